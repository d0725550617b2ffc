"""The models that training-free methods are compared on, and the sizes that each method makes of one."""

import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from flexrank import distillation_evaluator, probe_sensitivity
from flexrank.distill.objectives import EmbeddingObjective, LogitObjective
from flexrank.errors import FlexrankError
from flexrank.nn.select import select_layers
from flexrank.nn.switch import footprint, layer_shapes, use_profile
from flexrank.profiles import RankProfile, SensitivityTable
from flexrank.profiles.costs import profile_parameters, total_dense
from flexrank.refit import refit_
from flexrank.run.config import ProbeConfig, RunConfig
from flexrank.run.directory import RunDirectory
from flexrank.run.workspace import Workspace
from research.baselines import RANK_METHODS, SIZE_METHODS
from research.baselines.method import (
    CompressedModel,
    Evaluate,
    Layers,
    Loss,
    Measures,
    RankMethod,
    Settings,
    SizeMethod,
    dense_count,
    parameter_count,
    uniform_ranks,
    with_settings,
)
from research.baselines.statistics import mean_loss, next_token_loss
from research.benches import images, language, sts
from research.benches.configurations import config_subject, require_comparable
from research.benches.quality import Subject, chain_of
from research.benches.tasks import task_measure
from research.experiment import BUDGETS, EVERY_RANK, Request
from research.machine import track_resources
from research.studies.language import identity_of
from research.studies.vision import NETWORKS

#: flexrank's own decompositions, and one that fits a size of "fisher" by itself, which are compared with rivals.
DECOMPOSITIONS, REFIT = ("datasvd", "fisher"), "refit"
OURS = (*DECOMPOSITIONS, REFIT)
METHODS = (*RANK_METHODS, *DECOMPOSITIONS)
#: Those that make a separate model for each size.
SIZE_METHOD_NAMES = (*SIZE_METHODS, REFIT)
#: How ranks are chosen: as in the method's paper, or by flexrank from the method's own sensitivity table.
ALLOCATIONS = ("published", "paper", "joint")
#: The first row of a table.
WHOLE = "whole model at the budget, M parameters"
#: Which of a run's qualities tables and figure show, by its task.
CONFIG_MEASURES = {"language": "nats_per_token", "embedding": "cosine", "classification": "accuracy"}
#: Probed ranks of a layer; a method's own search chooses among all ranks.
LEVELS = ProbeConfig().levels


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A model, how it is scored, and the settings that its scores depend on."""

    name: str
    measure: str  #: which of the subject's scores tables and figure show
    digits: int
    budgets: Sequence[float]
    levels: int
    facts: Mapping[str, Any]
    subject: Callable[[int], Subject]  #: by seed, which draws calibration and probe and nothing else
    loss: Loss  #: the task's loss, summed over samples

    def __post_init__(self) -> None:
        object.__setattr__(self, "subject", functools.lru_cache(maxsize=1)(self.subject))

    def measures(self, seed: int) -> Measures:
        """Returns what rank searches evaluate by, on the probe's samples; without labels the loss is the distance."""
        subject = self.subject(seed)

        @functools.cache  # built on first use: uniform ranks need none
        def evaluator() -> Evaluate:
            return distillation_evaluator(subject.teacher, subject.probe, subject.objective)

        def distance(model: nn.Module) -> float:
            return evaluator()(model)

        has_labels = self.loss is next_token_loss
        return Measures(mean_loss(self.loss, subject.probe) if has_labels else distance, distance)

    def base_scores(self) -> dict[str, float]:
        """Returns the base model's scores."""
        subject = self.subject(0)
        return subject.score(subject.teacher)

    def parameters(self) -> dict[str, int]:
        """Returns `base_parameters` of the subject."""
        return base_parameters(self.subject(0))


def base_parameters(subject: Subject) -> dict[str, int]:
    """Returns the base model's parameters: those of the factorised layers' matrices, and all others."""
    dense = dense_count(select_layers(subject.teacher, exclude=subject.exclude))
    return {"layers": dense, "others": parameter_count(subject.teacher) - dense}


def millions_at(budgets: Sequence[float], parameters: Mapping[str, int]) -> list[float]:
    """Returns the whole model's parameters in millions, with this share of `base_parameters` in its layers."""
    return [(parameters["others"] + budget * parameters["layers"]) / 1e6 for budget in budgets]


def allocations_of(method: str) -> Sequence[str]:
    """Returns how ranks are chosen for a method: in all ways, or only as published if its sizes are not ranks."""
    if method == REFIT:
        return ALLOCATIONS[-1:]
    return ALLOCATIONS if method not in SIZE_METHODS or SIZE_METHODS[method].make_at else ALLOCATIONS[:1]


class DecomposedModel:
    """One method's elastic model for one draw of the calibration, decomposed when it is first needed."""

    def __init__(self, benchmark: Benchmark, method: str, seed: int, settings: Settings = MappingProxyType({})):
        self._benchmark, self._method, self._seed, self._settings = benchmark, method, seed, settings

    @property
    def _rival(self) -> RankMethod | None:
        """The method with its settings; None for ours."""
        return with_settings(RANK_METHODS[self._method], self._settings) if self._method in RANK_METHODS else None

    @functools.cached_property
    def _decomposition(self) -> tuple[nn.Module, Mapping[str, Tensor], dict[str, Any]]:
        """The model, its components' energies if the method chooses its own ranks, and the resources it took."""
        subject = self._benchmark.subject(self._seed)
        with track_resources() as resources:
            if (rival := self._rival) is None:
                return subject.decomposed(self._method), {}, resources
            model = copy.deepcopy(subject.teacher)
            layers = select_layers(model, exclude=subject.exclude)
            return model, rival.decompose_(model, subject.calibration, layers, self._benchmark.loss), resources

    def probe(self) -> dict[str, Any]:
        """Returns the sensitivity table of the method's factors, and what decomposition and probe took."""
        model, _, resources = self._decomposition
        subject, start = self._benchmark.subject(self._seed), time.perf_counter()
        evaluate = distillation_evaluator(subject.teacher, subject.probe, subject.objective)
        table = probe_sensitivity(model, evaluate, self._benchmark.levels, spacing="parameters", **EVERY_RANK)
        probe = time.perf_counter() - start
        own = {"decomposition_seconds": resources["seconds"], "peak_bytes": resources["peak_bytes"]}
        return {"table": table.to_json(), "probe_seconds": probe, **own}

    def measure_sizes(self, allocation: str, table: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns each budget's scores and size, whether sizes are nested, and the search's seconds."""
        _ = self._decomposition  # now, because `probe` counts its seconds
        start = time.perf_counter()
        profiles = self._profiles(allocation, table)
        seconds = time.perf_counter() - start
        nested = all(small.fits_in(large) for large, small in itertools.pairwise(filter(None, profiles)))
        rows = [profile and self._row(profile) for profile in profiles]
        return {"rows": rows, "nested": nested, "search_seconds": seconds}

    def _profiles(self, allocation: str, table: Mapping[str, Any] | None) -> Sequence[RankProfile | None]:
        """Returns each budget's ranks, largest first; the method's own need no table, and are None if none fit."""
        if table is not None and allocation != "published":
            return profiles_of(allocation, table, self._benchmark.budgets)
        model, energies, _ = self._decomposition
        own = self._rival.ranks if self._rival else uniform_ranks
        return own(model, energies, self._benchmark.budgets, self._benchmark.measures(self._seed))

    def _row(self, profile: RankProfile) -> dict[str, Any]:
        """Returns the model's parameters at these ranks, gauge-aligned without slack, and its scores."""
        model, *_ = self._decomposition
        shapes = layer_shapes(model)
        parameters = profile_parameters(profile, shapes)
        with use_profile(model, profile):
            scores = self._benchmark.subject(self._seed).score(model)
        whole = parameters + footprint(model).other_parameters
        return {"share": parameters / total_dense(shapes), "parameters": whole, "scores": scores}


def profiles_of(allocation: str, table: Mapping[str, Any], budgets: Sequence[float]) -> list[RankProfile]:
    """Returns flexrank's ranks at each budget, from a sensitivity table as JSON."""
    chain = chain_of(allocation, SensitivityTable.from_json(table), budgets)
    return [chain.at(budget) for budget in budgets]


def start_of(method: str) -> str:
    """Returns the method from whose factors a size method starts; empty if it starts from none."""
    return "fisher" if method == REFIT else SIZE_METHODS[method].start


def _size_method(subject: Subject, method: str, settings: Settings) -> SizeMethod:
    """Returns the size method, ours for this subject, with the settings."""
    return _refit_of(subject) if method == REFIT else with_settings(SIZE_METHODS[method], settings)


def _refit_of(subject: Subject) -> SizeMethod:
    decomposed = functools.cache(subject.decomposed)

    def make_at(
        model: nn.Module, batches: Sequence[Any], layers: Layers, _: Loss, ranks: Mapping[str, int]
    ) -> CompressedModel:
        new = copy.deepcopy(decomposed("fisher"))
        refit_(new, ranks, model, batches)
        stored = profile_parameters(ranks, layer_shapes(new))
        return CompressedModel(new, parameter_count(model) - dense_count(layers) + stored)

    # Its ranks are always allocated, so a model of one share for all layers is never asked for.
    return SizeMethod(REFIT, "this project", lambda *_: None, lambda *_: None, make_at)


def obstacle(benchmark: Benchmark, method: str) -> str | None:
    """Returns why a size method does not apply; None if it does."""
    subject = benchmark.subject(0)
    return _size_method(subject, method, {}).obstacle(
        subject.teacher, select_layers(subject.teacher, exclude=subject.exclude)
    )


def measure_size_method(
    benchmark: Benchmark,
    method: str,
    seed: int,
    settings: Settings = MappingProxyType({}),
    allocation: str = "published",
    table: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the same as `DecomposedModel.measure_sizes` for a size method that applies, and what its models took.

    A row is None if no model of the method is that small. `table` is that of the method it starts from.
    """
    subject, start = benchmark.subject(seed), time.perf_counter()
    rival = _size_method(subject, method, settings)
    make: Callable[..., CompressedModel | None] = rival.make
    sizes: Sequence[Any] = benchmark.budgets
    if table is not None and allocation != "published" and rival.make_at:
        make, sizes = rival.make_at, profiles_of(allocation, table, sizes)
    search, layers = time.perf_counter() - start, select_layers(subject.teacher, exclude=subject.exclude)
    parts, rows, costs = benchmark.parameters(), list[dict[str, Any] | None](), []
    for size in sizes:
        with track_resources() as resources:
            compressed = make(subject.teacher, subject.calibration, layers, benchmark.loss, size)
        costs.append(resources)
        if compressed is None:
            rows.append(None)
            continue
        share = (compressed.parameters - parts["others"]) / parts["layers"]
        rows.append({"share": share, "parameters": compressed.parameters, "scores": subject.score(compressed.model)})
    seconds, peak = search + sum(one["seconds"] for one in costs), max(one["peak_bytes"] for one in costs)
    return {"rows": rows, "nested": False, "seconds": seconds, "peak_bytes": peak}


def benchmarks(request: Request) -> list[Benchmark]:
    """Returns the benchmark of the request's configuration, or of the bench's own models, of which it may name one."""
    if request.config is not None:
        return [_config_benchmark(request, request.config)]
    own: dict[str, Callable[[Request, str], Benchmark]] = {
        "stories260k": _language_benchmark, "pycode5m": _language_benchmark, "babyllama": _language_benchmark,
        "all-MiniLM-L6-v2": _sentence_benchmark, **dict.fromkeys(NETWORKS, _image_benchmark),
    }  # fmt: skip
    if request.model is not None and request.model not in own:
        raise FlexrankError(f"--model is {request.model!r}; this bench has {', '.join(own)}, or any with --config")
    return [make(request, name) for name, make in own.items() if request.model in (None, name)]


def find_benchmark(request: Request, name: str) -> Benchmark:
    """Returns the request's benchmark of this name."""
    own = request if request.config else dataclasses.replace(request, model=name)
    return next(benchmark for benchmark in benchmarks(own) if benchmark.name == name)


def _language_benchmark(request: Request, name: str) -> Benchmark:
    """Returns a small Llama of the quality bench, in the quick form on fewer blocks."""
    texts = {one[0]: one for one in language.MODELS}[name]
    few = {"stories260k": (16, 64), "pycode5m": (8, 16), "babyllama": (16, 64)}[name]
    probe, evaluation = (language.PROBE, language.EVALUATION) if request.full else few

    def subject(seed: int) -> Subject:
        return language.subject_of(texts, request.half, seed=seed, probe=probe, evaluation=evaluation)[0]

    facts = {"calibration": language.CALIBRATION, "probe": probe, "evaluation": evaluation}
    return Benchmark(name, "nats", 3, BUDGETS, LEVELS, facts, subject, next_token_loss)


def _sentence_benchmark(request: Request, name: str) -> Benchmark:
    """Returns the sentence encoder of the quality bench, in the quick form on fewer pairs."""
    probe, evaluation = (sts.PROBE, None) if request.full else (48, 192)

    def subject(seed: int) -> Subject:
        return sts.subject_of(request.half, seed=seed, probe=probe, evaluation=evaluation)[0]

    loss = EmbeddingObjective().fisher_loss
    facts = {"calibration": sts.CALIBRATION, "probe": probe, "evaluation": evaluation}
    facts["docstrings"] = sts.DOCSTRINGS
    return Benchmark(name, "cosine", 4, BUDGETS, LEVELS, facts, subject, loss)


def _image_benchmark(request: Request, name: str) -> Benchmark:
    """Returns a network on CIFAR-10."""

    def subject(seed: int) -> Subject:
        return images.subject_of(name, request.work, request.half, seed=seed, is_full=request.full)[0]

    facts = {"calibration": images.CALIBRATION, "probe": images.PROBE, "full": request.full}
    loss = LogitObjective().fisher_loss
    return Benchmark(name, "accuracy", 4, BUDGETS, LEVELS, facts, subject, loss)


def _config_benchmark(request: Request, config: RunConfig) -> Benchmark:
    """Returns any model, in float32, with the samples and qualities of a run of this config, on the request's half."""
    require_comparable(config, request)
    space = Workspace(config, RunDirectory(request.work))
    loss = next_token_loss if config.task == "language" else space.objective().fisher_loss
    budgets = [budget for budget in config.allocation.budgets if budget < 1]
    facts = identity_of(config, ("task", "model", "seed", "data", "layers")) | task_measure(space, request)[1]
    facts |= {"temperature": config.distillation.temperature}
    return Benchmark(
        config.name, CONFIG_MEASURES[config.task], 4, budgets, config.probe.levels, facts,
        lambda seed: config_subject(request, config, seed, request.half)[0], loss,
    )  # fmt: skip
