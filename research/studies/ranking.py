"""Does the additive probe rank submodels as their joint losses do? All 10⁴ of them (FlexRank, appendix C.3)."""

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexrank import LogitObjective, SensitivityTable, collect_moments, decompose_
from flexrank.data.metrics import spearman
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers
from flexrank.probe import curvature_sensitivity, probe_sensitivity
from flexrank.profiles.costs import rank_levels
from flexrank.progress import track
from research.experiment import EVERY_RANK, Experiment, Ledger, Request
from research.figures import GREEN, OTHER, OURS, panels
from research.result import Result, between, claim, measured, spreads, table
from research.studies import mnist

NETWORKS = ("lenet", "narrow")
CALIBRATION, PROBE = 2048, 2000
#: What a probe and a joint loss measure: the divergence to the full network, or the labels' cross entropy.
LOSSES = ("divergence", "cross entropy")
Array = np.ndarray[Any, np.dtype[Any]]


def run(request: Request) -> Result:
    """Runs the study."""
    settings: dict[str, Any] = {"calibration": CALIBRATION, "probe": PROBE, "decomposition": "datasvd"}
    settings |= {"levels": mnist.LEVELS, "epochs": mnist.EPOCHS}
    ledger = Ledger(request.work, settings)
    results = {name: ledger.take_seeds(name, request.seeds, one_seed, name) for name in NETWORKS}
    first = results[NETWORKS[0]]
    claims = _claims([one["agreement"] for one in first])
    data = first[0]["shown"] | {"curves": [one["regrets"]["probe, divergence"] for one in first]}
    return measured(settings | {"seeds": request.seeds}, [_agreement_table(results)], claims, data)


def one_seed(name: str, seed: int) -> dict[str, Any]:
    """Trains and decomposes one network, and compares every prediction with every joint loss."""
    images, labels = mnist.load_images("train")
    network = mnist.train_network(name, images, labels, seed)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    calibration, probe = order[:CALIBRATION], order[CALIBRATION:][:PROBE]
    batches, loss = mnist.batches_of(images[calibration]), LogitObjective().fisher_loss
    moments = collect_moments(network, batches, select_layers(network), side="input", gradient_loss=loss)
    with torch.inference_mode():
        teacher = network(images[probe])
    decompose_(network, moments, method="datasvd")
    judges = [Judge(loss, images[probe], teacher, labels[probe]) for loss in LOSSES]
    joint = dict(zip(LOSSES, joint_losses(network, images[probe], judges), strict=True))
    tables = {
        f"probe, {judge.loss}": probe_sensitivity(network, judge, mnist.LEVELS, spacing="ranks", **EVERY_RANK)
        for judge in judges
    }
    curvature = curvature_sensitivity(network, moments, CALIBRATION, mnist.LEVELS, spacing="ranks", **EVERY_RANK)
    return _compared(tables | {"curvature, divergence": curvature}, joint)


@dataclasses.dataclass(frozen=True)
class Judge:
    """One of LOSSES over images (N, 1, 28, 28), of a model or of logits, given the teacher's logits and the labels."""

    loss: str
    images: Tensor
    teacher: Tensor
    labels: Tensor

    def of(self, logits: Tensor) -> Tensor:
        """Returns the loss, averaged over the N images: (…)."""
        if self.loss == "divergence":
            return mnist.divergence(logits, self.teacher)
        return -logits.log_softmax(-1)[..., torch.arange(len(self.labels)), self.labels].mean(-1)

    @torch.inference_mode()
    def __call__(self, model: nn.Module) -> float:  # noqa: D102
        return float(self.of(model(self.images)))


@torch.inference_mode()
def joint_losses(model: nn.Sequential, images: Tensor, judges: Sequence[Judge]) -> list[Array]:
    """Returns each judge's loss at every combination of rank levels, (K, …, K).

    The combinations form a tree, so what submodels share runs once. The last module is elastic; its levels are
    read off the running sum of its components.
    """
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
    levels = {name: rank_levels(shape, mnist.LEVELS, "ranks") for name, shape in shapes.items()}
    shape = [len(ranks) for ranks in levels.values()]
    losses = [np.empty(shape) for _ in judges]
    progress = iter(track(range(int(np.prod(shape[:-1]))), "all joint losses"))

    def descend(position: int, values: Tensor, chosen: tuple[int, ...]) -> None:
        module = model[position]
        if not isinstance(module, NestedLayer):
            descend(position + 1, module(values), chosen)
        elif position == len(model) - 1:
            bias = 0.0 if module.bias is None else module.bias
            parts = (values @ module.v.T)[:, :, None] * module.u  # (N, k, classes): what each component adds
            logits = parts.cumsum(1)[:, [rank - 1 for rank in levels[str(position)]]].transpose(0, 1) + bias
            for array, judge in zip(losses, judges, strict=True):
                array[chosen] = judge.of(logits).numpy()
            next(progress)
        else:
            for index, rank in enumerate(levels[str(position)]):
                module.rank = rank
                descend(position + 1, module(values), (*chosen, index))

    descend(0, images, ())
    next(progress, None)
    return losses


def _compared(tables: Mapping[str, SensitivityTable], joint: Mapping[str, Array]) -> dict[str, Any]:
    savings = total_savings(tables["probe, divergence"])
    agreement, regrets = {}, {}
    for name, one in tables.items():
        actual, predicted = joint[name.partition(", ")[2]].ravel(), additive(one).ravel()
        own = budget_regrets(predicted, actual, savings)
        missed = [regret for regret in own if regret > 0]
        agreement[name] = {
            "rho": spearman(predicted.tolist(), actual.tolist()), "nu": violation_rate(predicted, actual),
            "ranks, exact, match": 1 - len(missed) / max(1, len(own)),
            "ranks, exact, mean": float(np.mean(missed)) if missed else 0.0,
            "ranks, exact, max": max(missed, default=0.0),
        }  # fmt: skip
        regrets[name] = sorted(missed)
    predicted, actual = additive(tables["probe, divergence"]).ravel(), joint["divergence"].ravel()
    sample = np.random.default_rng(0).permutation(len(actual))[:2000]
    places = {  # of 2000 submodels, in both orders
        name: (np.argsort(np.argsort(values)) / (len(values) - 1))[sample].round(4).tolist()
        for name, values in (("actual", actual), ("predicted", predicted))
    }
    front = [[saving, best, chosen] for saving, _, best, chosen in budget_choices(predicted, actual, savings)]
    return {"agreement": agreement, "regrets": regrets, "shown": {"places": places, "front": front}}


def additive(one: SensitivityTable) -> Array:
    """Returns A(m) = Σ_l s_{l, m_l} of every submodel, (K, …, K)."""
    return functools.reduce(np.add.outer, map(np.array, one.errors.values()))


def total_savings(one: SensitivityTable) -> Array:
    """Returns how many ranks every submodel saves, flattened."""
    return functools.reduce(np.add.outer, [ranks[-1] - np.array(ranks) for ranks in one.ranks.values()]).ravel()


def violation_rate(predicted: Array, actual: Array) -> float:
    """Returns ν: the share of all pairs of submodels that the two order oppositely."""
    inversions, count = 0, len(predicted)
    for row in range(count - 1):
        signs = np.sign(predicted[row + 1 :] - predicted[row]) * np.sign(actual[row + 1 :] - actual[row])
        inversions += int((signs < 0).sum())
    return inversions / (count * (count - 1) / 2)


def budget_choices(predicted: Array, actual: Array, savings: Array) -> Iterator[tuple[int, int, float, float]]:
    """Yields each total saving, how many submodels have it, their least loss, and the loss of the one preferred."""
    for saving in np.unique(savings):
        among = np.flatnonzero(savings == saving)
        chosen = among[predicted[among].argmin()]
        yield int(saving), len(among), float(actual[among].min()), float(actual[chosen])


def budget_regrets(predicted: Array, actual: Array, savings: Array) -> list[float]:
    """Returns, for each total saving of two or more submodels, the preferred one's relative loss above the best."""
    choices = budget_choices(predicted, actual, savings)
    return [0.0 if chosen == best else (chosen - best) / best for _, count, best, chosen in choices if count > 1]


def _agreement_table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    keys = ("rho", "nu", "ranks, exact, match", "ranks, exact, mean", "ranks, exact, max")
    rows = [
        [f"{network}: {name}", *spreads(
            [one["agreement"][name][key] * (1 if key == "rho" else 100) for key in keys] for one in seeds
        )]
        for network, seeds in results.items() for name in seeds[0]["agreement"]
    ]  # fmt: skip
    title = "Additive prediction against all 10⁴ joint losses. p: share of exact totals of ranks whose best is chosen; "
    title += "regret: of the others, mean and largest"
    columns = ["network: prediction, loss", "ρ", "ν %", "p %", "regret %", "max %"]
    return table(title, columns, rows, digits=(3, 1, 1, 1, 1))


def _claims(agreement: Sequence[Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Returns claims on `lenet`, means over seeds; p and the largest regret are of the paper's loss, cross entropy."""
    rho, nu, match, largest = (
        {loss: [one[f"probe, {loss}"][key] for one in agreement] for loss in LOSSES}
        for key in ("rho", "nu", "ranks, exact, match", "ranks, exact, max")
    )

    def means(values: Mapping[str, Sequence[float]], form: str) -> str:
        return " and ".join(f"{statistics.fmean(of):{form}} ({loss})" for loss, of in values.items())

    judged = LOSSES[1]
    seeds = f"with the {judged}; the paper has one seed"
    return [
        claim("Spearman ρ of prediction and joint loss is at least .98", ".991", means(rho, ".3f"),
              min(map(statistics.fmean, rho.values())) >= 0.98),
        claim("pairwise violation rate ν is at most 4 %", "3.7 %", means(nu, ".2%"),
              max(map(statistics.fmean, nu.values())) <= 0.04),
        claim("exact-budget match p, savings in ranks, is at least the paper's", "94.1 %", means(match, ".1%"),
              statistics.fmean(match[judged]) >= 0.941, f"{between(match[judged])} {seeds}"),
        claim("largest regret where the best is missed, every seed", "below 12 %", means(largest, ".0%"),
              max(largest[judged]) < 0.12, f"{between(largest[judged], '.0%')} {seeds}"),
    ]  # fmt: skip


def draw(data: Mapping[str, Any]) -> Any:
    """Draws places in both orders; the best and the chosen loss at each total of ranks; regrets where these differ."""
    figure, (left, middle, right) = panels(3, (11, 3.4))
    left.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1)
    predicted, actual = data["places"]["predicted"], data["places"]["actual"]
    left.scatter(predicted, actual, s=2, alpha=0.4, color=OURS, linewidths=0, rasterized=True)
    left.set(xlabel="place by additive prediction", ylabel="place by joint loss", title="10⁴ submodels, one seed")
    savings, best, chosen = zip(*data["front"], strict=True)
    middle.plot(savings, best, color=GREEN, linewidth=1.6, label="best of this total")
    middle.plot(savings, chosen, ".", color=OTHER, markersize=4, label="chosen by prediction")
    middle.set(xlabel="ranks saved", ylabel="divergence to the full network", title="exact budgets")
    middle.set(yscale="log", ylim=(1e-7, None))
    for number, regrets in enumerate(data["curves"]):
        shares, label = np.arange(1, len(regrets) + 1) / len(regrets), None if number else "a seed each"
        right.step(100 * np.array(regrets), shares, where="post", color=OURS, alpha=0.6, label=label)
    right.axvline(12, color="#888888", linestyle="--", linewidth=1, label="paper's largest")
    right.set(xlabel="regret, %", ylabel="share of the missed budgets", title="where the best is missed")
    middle.legend()
    right.legend(loc="lower right")
    return figure


EXPERIMENT = Experiment(
    name="ranking", title="Ranking preservation of the additive probe",
    shows="Spearman ρ, violation rate ν, exact-budget match p and regret over all 10⁴ submodels of an MNIST network",
    paper="ρ .991, ν 3.7 %, p 94.1 %, regret below 12 % (appendix C.3)",
    minutes=6, seeds=(5, 5), run=run, draw=draw,
)  # fmt: skip
