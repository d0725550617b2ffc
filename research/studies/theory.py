"""The need for nestedness on the paper's linear model: three objectives, all submodels (FlexRank, section 4, Fig. 2).

M* is 10 × 10 with singular values i^-1.2. Its factors U, V are trained as a whole (PTS), over all 1023 submodels (ASL),
or over the ten nested ones (NSL); every submodel is then compared with the best matrices of its rank, all in float64.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from flexrank.progress import track
from research.experiment import Experiment, Ledger, Request
from research.figures import GREEN, OTHER, OURS, panels
from research.result import Result, claim, measured, spreads, table

SIZE, DECAY, SEEDS = 10, 1.2, 20
#: As parts of ‖M*‖²: below the first a minimum counts as the global one, below the second a gap counts as zero.
EXCESS, ZERO = 1e-12, 1e-6
#: L-BFGS steps per round, rounds per start, and starts, before a minimisation is given up (and reported).
STEPS, ROUNDS, STARTS = 2000, 10, 5
FIGURE_SEED = 0
TITLES = {"pts": "post-training selection (PTS)", "asl": "all-subspaces learning (ASL)", "nsl": "nested learning (NSL)"}
Matrix = Float[np.ndarray, "m n"]
Objective = Callable[[Matrix, Matrix, Matrix], tuple[float, Matrix, Matrix]]


class Target(NamedTuple):
    """M* = P diag(σ) Qᵀ, k × k: `left` is P, `singular` is σ, descending, and `right` is Q."""

    left: Matrix
    singular: Float[np.ndarray, " k"]
    right: Matrix

    def truncation(self, rank: int) -> Matrix:
        """Returns A_r, the best matrix of this rank (Eckart, Young and Mirsky); A_k is M* itself."""
        return (self.left[:, :rank] * self.singular[:rank]) @ self.right[:, :rank].T


def draw_target(seed: int) -> Target:
    """Returns a random M*: P, Q uniform orthogonal matrices, σ_i = i^-1.2 ("Details on controlled experiments")."""
    generator, sides = np.random.default_rng([seed, 0]), []
    for _ in range(2):
        q, r = np.linalg.qr(generator.standard_normal((SIZE, SIZE)))
        sides.append(q * np.sign(np.diag(r)))  # without the signs it would not be uniform
    return Target(sides[0], np.arange(1, SIZE + 1) ** -DECAY, sides[1])


def full_objective(u: Matrix, v: Matrix, matrix: Matrix) -> tuple[float, Matrix, Matrix]:
    """Returns PTS, ‖U Vᵀ − M*‖² (FlexRank, eq. 10), and its gradients in U and V."""
    rest = u @ v.T - matrix
    return float((rest**2).sum()), 2 * rest @ v, 2 * rest.T @ u


def subspaces_objective(u: Matrix, v: Matrix, matrix: Matrix) -> tuple[float, Matrix, Matrix]:
    """Returns ASL, the mean of ‖U Π_S Vᵀ − M*‖² over all 2^k − 1 non-empty S (eq. 11), and its gradients.

    Over all S, with the empty one, it is ¼ ‖U Vᵀ − 2 M*‖² + ¼ Σ_j ‖u_j‖² ‖v_j‖² ("Rank-dropout objective expansion").
    """
    count = 2 ** u.shape[1]
    rest, lengths_u, lengths_v = u @ v.T - 2 * matrix, (u**2).sum(0), (v**2).sum(0)
    mean, scale = ((rest**2).sum() + lengths_u @ lengths_v) / 4, count / (count - 1)
    value = float(scale * mean - (matrix**2).sum() / (count - 1))
    return value, scale * (rest @ v + u * lengths_v) / 2, scale * (rest.T @ u + v * lengths_u) / 2


def nested_objective(u: Matrix, v: Matrix, matrix: Matrix) -> tuple[float, Matrix, Matrix]:
    """Returns NSL, the mean of ‖U Π_[r] Vᵀ − M*‖² over the k prefixes (eq. 12), and its gradients."""
    rests = np.cumsum(u.T[:, :, None] * v.T[:, None, :], 0) - matrix
    # Component j is in the prefixes from j on, so its gradient is that of the sum of their residuals.
    pulls = np.cumsum(rests[::-1], 0)[::-1] * (2 / len(rests))
    return float((rests**2).sum() / len(rests)), np.einsum("jmn,nj->mj", pulls, v), np.einsum("jmn,mj->nj", pulls, u)


OBJECTIVES: dict[str, Objective] = {"pts": full_objective, "asl": subspaces_objective, "nsl": nested_objective}


def spectral_minimiser(singular: Float[np.ndarray, " k"]) -> tuple[float, Float[np.ndarray, " k"]]:
    """Returns λ and the singular values max(0, 2σ − λ) of ASL's minimiser U Vᵀ, where λ is their mean.

    The lemma leaves λ to a fixed point; with s positive values it is 2 Σ_{i≤s} σ_i / (k + s), for the s that agrees.
    """
    k = len(singular)
    means = 2 * np.cumsum(singular) / (k + np.arange(1, k + 1))
    mean = float(means[np.flatnonzero(2 * singular > means)[-1]])
    return mean, np.maximum(0, 2 * singular - mean)


def least_loss(method: str, singular: Float[np.ndarray, " k"]) -> float:
    """Returns the global minimum: 0 for PTS, at `spectral_minimiser` for ASL, the front's mean error for NSL."""
    if method == "pts":
        return 0.0
    if method == "nsl":
        return float(true_front(singular).mean())
    mean, values = spectral_minimiser(singular)
    over_all, count = (((values - 2 * singular) ** 2).sum() + len(singular) * mean**2) / 4, 2 ** len(singular)
    return float(count * over_all - (singular**2).sum()) / (count - 1)


def true_front(singular: Float[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
    """Returns ‖A_r − M*‖² = Σ_{i>r} σ_i² at r = 1 … k."""
    return np.append(np.cumsum((singular**2)[::-1])[::-1][1:], 0.0)


def minimise(method: str, target: Target, seed: int) -> tuple[Matrix, Matrix, float, int, int]:
    """Minimises by L-BFGS from random normal factors of variance 1/k.

    Returns the factors, the excess over the minimum, and the rounds and starts taken. A round that used up its steps is
    continued from balanced factors; one that stopped above the global minimum is followed by another start.
    """
    from scipy.optimize import minimize

    matrix, least = target.truncation(SIZE), least_loss(method, target.singular)

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        u, v = point.reshape(2, SIZE, SIZE)
        value, *gradients = OBJECTIVES[method](u, v, matrix)
        return value, np.concatenate([gradient.ravel() for gradient in gradients])

    # No tolerance: a round ends where the loss no longer falls in float64, or when its steps are used up.
    options: Any = {"maxiter": STEPS, "maxfun": 10 * STEPS, "ftol": 0.0, "gtol": 1e-14}
    excess, total, start = np.inf, 0, 0
    while excess > EXCESS and start < STARTS:
        start += 1
        point = np.random.default_rng([seed, start]).standard_normal(2 * SIZE * SIZE) / SIZE**0.5
        for _ in range(ROUNDS):
            end: Any = minimize(loss, point, jac=True, method="L-BFGS-B", options=options)
            total += 1
            excess = (end.fun - least) / (target.singular**2).sum()
            if excess <= EXCESS or end.status == 0:
                break
            point = _balanced(end.x)
    u, v = end.x.reshape(2, SIZE, SIZE)
    return u, v, excess, total, start


def _balanced(point: np.ndarray) -> np.ndarray:
    """Rescales each pair u_j, v_j to equal norms, which changes no submodel."""
    u, v = point.reshape(2, SIZE, SIZE)
    scale = np.sqrt(np.linalg.norm(v, axis=0) / np.linalg.norm(u, axis=0))
    return np.stack([u * scale, v / scale]).ravel()


def masks() -> Bool[np.ndarray, "s k"]:
    """Returns all 2^k − 1 non-empty sets S of components; row i holds the binary digits of i + 1, lowest first."""
    return (np.arange(1, 2**SIZE)[:, None] >> np.arange(SIZE) & 1).astype(bool)


def submodels(u: Matrix, v: Matrix) -> Float[np.ndarray, "s m n"]:
    """Returns U Π_S Vᵀ for every S of `masks`."""
    return np.einsum("sj,mj,nj->smn", masks().astype(u.dtype), u, v, optimize=True)


def best_gaps(u: Matrix, v: Matrix, target: Target) -> Float[np.ndarray, " k"]:
    """Returns ℰ(U, V, r) = min over |S| = r of ‖U Π_S Vᵀ − A_r‖² (FlexRank, eq. 9), for r = 1 … k, over all S."""
    products, ranks = submodels(u, v), masks().sum(1)
    by_rank = [(products[ranks == r], target.truncation(r)) for r in range(1, SIZE + 1)]
    return np.array([((of_rank - best) ** 2).sum((1, 2)).min() for of_rank, best in by_rank])


def gap_bound(reached: Float[np.ndarray, " k"], singular: Float[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
    """Returns (rλ − Σ_{i≤r} σ_i)² / k for r = 1 … k, λ = ‖U Vᵀ‖_* / k from the values reached (theorem 4.2)."""
    k = len(singular)
    return (np.arange(1, k + 1) * reached.sum() / k - np.cumsum(singular)) ** 2 / k


def run(request: Request) -> Result:
    """Runs the study."""
    settings = {"size": SIZE, "decay": DECAY, "steps": STEPS, "rounds": ROUNDS, "starts": STARTS, "excess": EXCESS}
    ledger = Ledger(request.work, settings)
    units = [ledger.take(f"seed {seed}", _measure, seed) for seed in track(range(request.seeds), "three objectives")]
    singular = draw_target(FIGURE_SEED).singular
    norm = float((singular**2).sum())
    spectra = np.array([unit["asl"]["singular"] for unit in units])
    pts, asl, nsl = (np.array([unit[method]["gaps"] for unit in units]) for method in OBJECTIVES)
    bound = np.array([gap_bound(one, singular) for one in spectra])
    rows = [[rank, *cells] for rank, cells in enumerate(zip(*map(spreads, (pts, asl, bound, nsl)), strict=True), 1)]
    title = f"best-submodel gap ℰ(U, V, r), {len(units)} seeds, mean ± sd; ‖M*‖² = {norm:.3f}"
    ranks, front = masks().sum(1).tolist(), true_front(singular).tolist()
    return measured(
        settings | {"seeds": request.seeds, "masks": len(ranks), "squared_norm": norm},
        [table(title, ["r", "PTS", "ASL", "ASL's bound", "NSL"], rows)],
        [*_claims(pts / norm, asl / norm, bound / norm, nsl / norm, spectra, singular), _optimum_claim(units)],
        {"seed": FIGURE_SEED, "errors": units[FIGURE_SEED]["errors"], "ranks": ranks, "front": front},
    )


def _measure(seed: int) -> dict[str, Any]:
    target, unit, errors = draw_target(seed), dict[str, Any](), {}
    for method in OBJECTIVES:
        u, v, excess, rounds, starts = minimise(method, target, seed)
        spectrum = np.linalg.svd(u @ v.T, compute_uv=False).tolist()
        ended = {"excess": float(excess), "rounds": rounds, "starts": starts}
        unit[method] = {"gaps": best_gaps(u, v, target).tolist(), "singular": spectrum} | ended
        errors[method] = [float(f"{e:.5g}") for e in ((submodels(u, v) - target.truncation(SIZE)) ** 2).sum((1, 2))]
    return unit | ({"errors": errors} if seed == FIGURE_SEED else {})


def _claims(pts: Any, asl: Any, bound: Any, nsl: Any, spectra: Any, singular: Any) -> list[dict[str, Any]]:
    """Returns the claims on the theorems; gaps and the bound are parts of ‖M*‖², (seeds, k) each."""
    least = np.unravel_index(pts[:, :-1].argmin(), pts[:, :-1].shape)
    mean, predicted = spectral_minimiser(singular)
    off, average = np.abs(spectra - predicted).max() / singular[0], singular.mean()
    count = f"{len(pts)} seeds"
    return [
        claim("theorem 4.1: trained as a whole, no submodel of rank r < k is optimal", "gap > 0 with probability 1",
              f"gap at least {pts[least]:.2g} of ‖M*‖² over {count} (seed {least[0]}, r = {least[1] + 1}), "
              f"and at most {pts[:, -1].max():.0e} at r = k",
              bool(pts[:, :-1].min() > ZERO and pts[:, -1].max() < ZERO)),
        claim("theorem 4.2: ASL's gap is at least (rλ − Σσ)²/k at every r", "gap ≥ bound",
              f"gap over bound at least {(asl / bound).min():.2f} over {count} and {SIZE} ranks; "
              f"least gap {asl.min():.2g} of ‖M*‖²", bool((asl >= bound).all())),
        claim("lemma on ASL's spectrum: its minimiser has singular values max(0, 2σ − λ)", "equal",
              f"off by at most {off:.0e} of σ_1 over {count}", bool(off < ZERO)),
        claim("proof of theorem 4.2: λ is the mean of σ, so the bound is 0 at r = k", f"{average:.4f}", f"{mean:.4f}",
              bool(abs(mean - average) < ZERO * average),
              f"the proof assumes that no max(0, ·) binds, here {(predicted == 0).sum()} of {SIZE} do; the bound "
              "does not use it"),
        claim("theorem 4.3: nested learning recovers the Pareto front", "gap 0 at every r",
              f"gap at most {nsl.max():.0e} of ‖M*‖² over {count} and {SIZE} ranks", bool(nsl.max() < ZERO)),
    ]  # fmt: skip


def _optimum_claim(units: list[Any]) -> dict[str, Any]:
    minima = [unit[method] for unit in units for method in OBJECTIVES]
    reached, worst = sum(one["excess"] <= EXCESS for one in minima), max(one["excess"] for one in minima)
    restarts, longer = sum(one["starts"] - 1 for one in minima), sum(one["rounds"] > one["starts"] for one in minima)
    here = f"{reached} of {len(minima)} minimisations, worst excess {worst:.0e} of ‖M*‖²; {restarts} restarts, "
    here += f"{longer} needed more than {STEPS} steps"
    what = "assumed by the proofs: gradient descent reaches the global minimum"
    return claim(what, "assumed", here, reached == len(minima))


def draw(data: Mapping[str, Any]) -> Any:
    """Draws rank against every submodel's error to M*, the best of each rank, and the front; a panel per objective."""
    figure, places = panels(3, (10, 3.4), sharey=True)
    ranks, by_rank = np.array(data["ranks"]), range(1, SIZE + 1)
    for axes, method in zip(places, OBJECTIVES, strict=True):
        errors = np.array(data["errors"][method])
        best = [errors[ranks == r].min() for r in by_rank]
        axes.scatter(ranks, errors, s=7, color=OURS, alpha=0.2, linewidths=0, label=f"all {len(ranks)} submodels")
        axes.plot(by_rank, best, color=OTHER, marker="o", markersize=4, linewidth=1.6, label="best of each rank")
        axes.plot(by_rank, data["front"], color=GREEN, linestyle="--", linewidth=1.8, label="true Pareto front")
        axes.set_title(TITLES[method], loc="left", fontsize=10)
        axes.set(xlabel="rank r", xticks=by_rank)
    places[0].set_ylabel(f"squared error to M*, seed {data['seed']}")
    places[1].legend()
    return figure


EXPERIMENT = Experiment(
    name="theory", title="Nested training, and only it, recovers the Pareto front of a linear model",
    shows="a 10 × 10 linear model trained as a whole, over all 1023 submodels, and nested: the best submodels' gaps",
    paper="the gap is zero only for nested learning (section 4, Fig. 2, theorems 4.1 to 4.3)",
    minutes=0.2, seeds=(SEEDS, SEEDS), run=run, draw=draw,
)  # fmt: skip
