"""The learning rate of consolidation, chosen by short trials where the configuration has none."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from flexrank import processes
from flexrank.errors import DivergedError, FlexrankError
from flexrank.files import read_json, write_json
from flexrank.profiles import ProfileChain
from flexrank.run.config import RunConfig
from flexrank.run.training import probe_losses, train_
from flexrank.run.workspace import Workspace

#: The learning rate of a run that is too short for trials.
UNTRIED = 1e-4
#: Trials are at rates of 10 ** (n / 2); the first n, and the least and the greatest.
FIRST, ENDS = -7, (-12, -3)
#: A trial takes a step for each `SHARE` of the run's, but `MOST` steps at most; there is none of fewer than `LEAST`.
SHARE, LEAST, MOST = 25, 8, 80
#: The best rate of a run over that of its trials, which are shorter: 1.5 to 3 in docs/log.md.
LONGER = 2.0
log = logging.getLogger("flexrank")


def choose_rate(work: Workspace, chain: ProfileChain, fingerprint: str, weights: Sequence[float] | None) -> float:
    """The configuration's learning rate or, if it has none, one found by short trials; `UNTRIED` in a short run.

    Each trial is a consolidation of its own, in a small share of the steps. The best has the least mean over sizes,
    weighted by `weights`, of the cube root of the loss on the probe's samples. `balanced` lowers a sum of square roots,
    by which large sizes, whose losses are small, count so little that the best rate makes them worse; by logarithms
    they count too much. Twice the best rate is returned, or that rate itself if a higher one has diverged.
    After an interruption, finished trials are read from RUN/partial. Raises FlexrankError if all diverge.
    """
    steps = trial_steps(work.config)
    if not steps:
        return work.config.distillation.learning_rate or UNTRIED
    path = work.directory.partial("distill", fingerprint, ".rates.json")
    costs: dict[str, float | None] = processes.on_first_process(lambda: read_json(path) if path.is_file() else {})

    def cost(position: int) -> float:
        rate = float(f"{10 ** (position / 2):.2g}")
        if str(rate) not in costs:
            log.info("distill: %d steps on trial, at a learning rate of %g", steps, rate)
            found = _trial(work, chain, rate, steps, weights)
            costs[str(rate)] = processes.on_first_process(lambda: found)  # all must choose alike
            processes.on_first_process(lambda: write_json(path, costs))
        known = costs[str(rate)]
        return math.inf if known is None else known

    best = minimum(cost, FIRST, *ENDS)
    if all(known is None for known in costs.values()):
        raise FlexrankError("every learning rate on trial diverges; check the texts or images, and the model's outputs")
    factor = 1.0 if None in costs.values() else LONGER  # twice the best may diverge too
    chosen = float(f"{factor * 10 ** (best / 2):.2g}")
    log.info("distill: the learning rate is %g, by %d trials of %d steps", chosen, len(costs), steps)
    return chosen


def trial_steps(config: RunConfig) -> int:
    """The steps of each trial; 0 if a run of this configuration has none."""
    settings = config.distillation
    steps = min(settings.steps // SHARE, MOST)
    return steps if settings.learning_rate is None and steps >= LEAST else 0


def minimum(cost: Callable[[int], float], start: int, least: int, greatest: int) -> float:
    """Where a function of whole numbers from `least` to `greatest` is least, if it falls and then rises.

    It is searched from `start` upwards, or else downwards, there also as long as it is infinite; between whole numbers,
    the parabola through the least value and its two neighbours decides.
    """
    best = start
    while best < greatest and cost(best + 1) < cost(best):
        best += 1
    while best > least and (cost(best - 1) < cost(best) or cost(best) == math.inf):
        best -= 1
    if not least < best < greatest:
        return best
    below, lowest, above = (cost(position) for position in (best - 1, best, best + 1))
    curvature = below - 2 * lowest + above
    return best + (below - above) / (2 * curvature) if 0 < curvature < math.inf else best


def _trial(work: Workspace, chain: ProfileChain, rate: float, steps: int, weights: Any) -> float | None:
    """The weighted mean cube root of the sizes' losses after a training at this rate; None if it diverges."""
    profiles = [entry.profile for entry in chain.requested]
    with work.student(profiles) as model:
        try:
            train_(work, model, chain, steps, rate, weights=weights)
        except DivergedError:
            return None
        losses = probe_losses(work, model, profiles)
    shares = weights or [1.0] * len(losses)
    roots = [math.cbrt(max(loss, 0.0)) for loss in losses]  # rounding leaves some below 0
    cost = sum(share * root for share, root in zip(shares, roots, strict=True)) / sum(shares)
    return cost if math.isfinite(cost) else None
