"""What each part of consolidation is worth: flexrank trains by its defaults, and without one part at a time.

All variants start from the same factors and ranks, and take as many steps on the same batches at one learning rate: for
the models below the best of flexrank's trials in `compare-trained`, for any other its benchmark's. Finished parts are
not repeated. The paper's form, without all parts, also trains norms and biases, and by factors what a size leaves full.
"""

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from flexrank.distill import distill_, mixing, optimizer
from flexrank.distill.schedule import RunningLosses
from research import figures
from research.baselines.trained.ranks import at
from research.baselines.trained.task import WARMUP, TrainingTask
from research.benches.training_benchmarks import TrainingBenchmark, find_training_benchmark, training_benchmarks
from research.experiment import Experiment, Ledger, Request
from research.measures import distance
from research.result import Result, between, goal, measured, spreads, table

DEFAULT, BEFORE = "by the defaults", "before training"
#: For each part, how the options of `distill_` change without it.
PARTS: dict[str, Callable[[TrainingTask], dict[str, Any]]] = {
    "losses balanced": lambda task: {},
    "components mixed": lambda task: {},
    "vectors of each size's own": lambda task: {},
    "largest size drawn twice as often": lambda task: {"weights": [1.0] * len(task.budgets)},
    "hidden states followed": lambda task: {"objective": task.output_objective},
    "all of them (eq. 6)": lambda task: {"objective": task.output_objective, "method": "paper"},
}
#: What has to be replaced in the package where no option leaves a part out.
PATCHES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "losses balanced": lambda: patch.object(RunningLosses, "mean", lambda *_: 1.0),
    "components mixed": lambda: patch.object(mixing, "MIXING_RATE", 0.0),
    "vectors of each size's own": lambda: patch.object(optimizer, "VECTORS_RATE", 0.0),
}
COLOURS = dict(zip(PARTS, figures.RIVALS, strict=False))
#: The models that are measured unless the request has another, and their learning rates.
RATES = {"stories260k": 2e-3, "pycode5m": 1e-4, "all-MiniLM-L6-v2": 5e-5, "resnet20": 2.5e-4}
Rows = list[dict[str, Any]]


def run(request: Request) -> Result:
    """Trains every variant on every model."""
    chosen = training_benchmarks(request)
    if request.config is None and request.model is None:
        chosen = [one for one in chosen if one.name in RATES]
    data = {benchmark.name: _measure(benchmark, request) for benchmark in chosen}
    claims = [_claim(name, one, part) for name, one in data.items() for part in PARTS if part in one["rows"]]
    settings = {name: one["facts"] for name, one in data.items()}
    tables = [_table(name, one) for name, one in data.items()]
    return measured({**settings, "seeds": request.seeds, "jobs": request.jobs}, tables, claims, data)


def _measure(benchmark: TrainingBenchmark, request: Request) -> dict[str, Any]:
    """Returns the base model's score, and by variant the scores of each seed's sizes."""
    facts: dict[str, Any] = {"steps": benchmark.steps, "learning_rate": _rate(benchmark), "levels": benchmark.levels}
    facts |= {"budgets": list(benchmark.budgets), **benchmark.facts}
    ledger, arguments = Ledger(request.work, {"model": benchmark.name, **facts}), (request, benchmark.name)
    seeds = range(request.seeds)
    probes = {f"sensitivities, seed {seed}": (*arguments, seed) for seed in seeds}
    tables = list(ledger.take_all(probes, sensitivity_unit, request.jobs).values())
    variants = [one for one in (DEFAULT, BEFORE, *PARTS) if one != "hidden states followed" or _has_hidden(benchmark)]
    units = {
        f"{variant}, seed {seed}": (*arguments, variant, seed, tables[seed])
        for seed, variant in itertools.product(seeds, variants)
    }
    done = ledger.take_all(units, variant_unit, request.jobs)
    rows = {variant: [done[f"{variant}, seed {seed}"] for seed in seeds] for variant in variants}
    base = ledger.take("base", _base_score, benchmark)
    kept = {"measure": benchmark.measure, "digits": benchmark.digits, "budgets": list(benchmark.budgets)}
    return {"base": base, "rows": rows, "facts": facts, **kept}


def _base_score(benchmark: TrainingBenchmark) -> float:
    subject, _ = benchmark.subject_and_batches(0, "reporting")
    return subject.score(subject.teacher)[benchmark.measure]


def _rate(benchmark: TrainingBenchmark) -> float:
    return RATES.get(benchmark.name, benchmark.default_rate)


def _has_hidden(benchmark: TrainingBenchmark) -> bool:
    return repr(benchmark.objective) != repr(benchmark.output_objective)


def sensitivity_unit(request: Request, name: str, seed: int) -> dict[str, Any]:
    """Returns the sensitivity table by which all variants choose their ranks."""
    return find_training_benchmark(request, name).table(seed, "fisher")


def variant_unit(request: Request, name: str, variant: str, seed: int, sensitivities: dict[str, Any]) -> Rows:
    """Returns the scores of a variant's sizes, by budget."""
    benchmark = find_training_benchmark(request, name)
    subject, batches = benchmark.subject_and_batches(seed, "reporting")
    task = benchmark.training_task(subject, batches, {"fisher": sensitivities}, seed, benchmark.steps, 0)
    model, chain = task.decompose("fisher"), task.chain("fisher", "joint")
    if variant != BEFORE:
        options = {"objective": task.objective, **PARTS.get(variant, lambda _: {})(task)}
        with task.forward_context(model), PATCHES.get(variant, contextlib.nullcontext)():
            distill_(
                model, task.teacher, batches, chain, steps=task.steps, learning_rate=_rate(benchmark),
                warmup_steps=round(WARMUP * task.steps), autocast=task.autocast, seed=seed, **options,
            )  # fmt: skip
    sizes = (size for budget in task.budgets for size in at(model, chain.at(budget)))
    return [{"scores": subject.score(size)} for size, _ in sizes]


def _table(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    measure = data["measure"]
    rows = [
        [_row_name(variant), *spreads([row["scores"][measure] for row in rows] for rows in runs)]
        for variant, runs in data["rows"].items()
    ]
    title = f"{name}: {measure} by budget (base {data['base']:.{data['digits']}f})"
    return table(title, ["", *data["budgets"]], rows, data["digits"] + 1)


def _row_name(variant: str) -> str:
    return f"without: {variant}" if variant in PARTS else variant


def _claim(name: str, data: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Claims that without the part the distance from the base model, a geometric mean over sizes, is no smaller."""
    changes = [other - own for own, other in zip(_errors(data, DEFAULT), _errors(data, part), strict=True)]
    what = f"{name}, without: {part}: the mean logarithm of the sizes' distances rises, at each seed"
    return goal(what, "above 0", between(changes, "+.3f"), min(changes) > 0)


def _errors(data: Mapping[str, Any], variant: str) -> list[float]:
    """The mean logarithm of the sizes' distances, by seed."""
    return [statistics.fmean(map(math.log, distances)) for distances in _distances(data, variant)]


def draw(data: Mapping[str, Any]) -> Any:
    """Draws each variant's distance from the base model's quality over that of the defaults: a panel for each model."""
    from matplotlib.ticker import LogFormatter

    figure, all_axes = figures.panels(len(data), (1.8 + 4.4 * len(data), 4.4))
    for axes, (name, one) in zip(all_axes, data.items(), strict=True):
        own = _distances(one, DEFAULT)
        for part in (part for part in PARTS if part in one["rows"]):
            lines = [
                [other / distance for other, distance in zip(others, distances, strict=True)]
                for others, distances in zip(_distances(one, part), own, strict=True)
            ]
            figures.draw_seeds(axes, one["budgets"], lines, COLOURS[part], _row_name(part), markersize=3)
        figures.draw_level(axes, 1.0, DEFAULT)
        axes.set(title=name, xlabel="budget", ylabel=f"{one['measure']}: distance over the defaults'", yscale="log")
        axes.yaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter())  # 1.2, not 1.2 times 10 to the 0
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def _distances(data: Mapping[str, Any], variant: str) -> list[list[float]]:
    """The distances of a variant's sizes from the base model, by seed and budget."""
    measure, base = data["measure"], data["base"]
    return [[distance(measure, row["scores"][measure], base) for row in rows] for rows in data["rows"][variant]]


EXPERIMENT = Experiment(
    "ablation", "What each part of consolidation is worth",
    "every size's quality by the default consolidation and without one of its parts, at equal steps",
    minutes=180, full_minutes=1000, seeds=(3, 3), run=run, draw=draw, takes_config=True,
)  # fmt: skip
