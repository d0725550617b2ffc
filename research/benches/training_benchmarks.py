"""The models that trained rivals are compared on: what methods learn from, and how they are scored."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from flexrank import distillation_evaluator, probe_sensitivity
from flexrank.data.batches import Batch, model_device
from flexrank.data.halves import Half
from flexrank.decompose import Method
from flexrank.distill.objectives import EmbeddingObjective, FisherObjective, LogitObjective, Objective
from flexrank.errors import FlexrankError
from flexrank.hf.models import eager_attention, hidden_states
from flexrank.nn.matrix import matrix_shape
from flexrank.nn.select import select_layers
from flexrank.profiles import SensitivityTable
from flexrank.run.config import RunConfig
from flexrank.run.directory import RunDirectory
from flexrank.run.training import autocast_dtype
from flexrank.run.trials import UNTRIED
from flexrank.run.workspace import Workspace
from research.baselines.method import Loss
from research.baselines.statistics import next_token_loss
from research.baselines.trained.task import TrainingTask
from research.benches import images, language, sts
from research.benches.configurations import TAKEN, config_subject, require_comparable
from research.benches.quality import Subject, chain_of
from research.benches.tasks import task_measure
from research.benches.training_free import CONFIG_MEASURES
from research.experiment import BUDGETS, EVERY_RANK, Request
from research.studies.language import identity_of
from research.studies.vision import NETWORKS

#: Fewest steps of a size that is trained separately: adapters of U and of V take one each.
LEAST_STEPS = 2
#: Steps of all sizes together, in the quick and in the full form.
STEPS = {"stories260k": (320, 1600), "pycode5m": (160, 800), "babyllama": (320, 1600), "all-MiniLM-L6-v2": (160, 800)}
STEPS |= {"resnet20": (320, 700), "vit": (320, 700)}
#: The learning rates around which trials lie, in place of those of the longer `language`, `sts` and `vision`.
RATES = {"stories260k": 2e-3, "pycode5m": 2e-4, "babyllama": 1e-3, "all-MiniLM-L6-v2": 1e-4}
RATES |= {"resnet20": 1e-3, "vit": 1e-4}
#: The settings of training that a configuration may give.
TRAINING_KEYS = frozenset(
    f"distillation.{key}" for key in ("steps", "learning_rate", "batch_size", "hidden_weight", "autocast")
)


@dataclasses.dataclass(frozen=True)
class TrainingBenchmark:
    """A model, its training, and how it is scored."""

    name: str
    measure: str  #: which of the subject's scores tables and figure show
    digits: int
    budgets: Sequence[float]
    steps: int
    default_rate: float
    levels: int
    facts: Mapping[str, Any]
    subject_and_batches: Callable[[int, Half], tuple[Subject, Iterable[Batch]]]  #: by seed and scored half
    objective: FisherObjective
    output_objective: Objective
    label_loss: Loss | None
    forward_context: Callable[[nn.Module, nn.Module], contextlib.AbstractContextManager[None]]
    autocast: str = "auto"

    def table(self, seed: int, method: Method) -> dict[str, Any]:
        """Returns the sensitivity table of a decomposition's components."""
        subject, _ = self.subject_and_batches(seed, "reporting")
        evaluate = distillation_evaluator(subject.teacher, subject.probe, subject.objective)
        model = subject.decomposed(method)
        return probe_sensitivity(model, evaluate, self.levels, spacing="parameters", **EVERY_RANK).to_json()

    def training_task(
        self, subject: Subject, batches: Iterable[Batch], tables: dict[str, Any], seed: int, steps: int, per_size: int
    ) -> TrainingTask:
        """Returns what a method is given; `per_size` is the number of steps of a size that is trained separately."""
        layers = select_layers(subject.teacher, exclude=subject.exclude)
        errors = {method: SensitivityTable.from_json(one) for method, one in tables.items()}
        decomposed = functools.cache(subject.decomposed)
        return TrainingTask(
            subject.teacher, subject.calibration, batches, self.budgets, steps, per_size, self.objective,
            self.output_objective, self.label_loss, decompose=lambda method: copy.deepcopy(decomposed(method)),
            chain=functools.cache(lambda method, allocation: chain_of(allocation, errors[method], self.budgets)),
            forward_context=lambda model: self.forward_context(model, subject.teacher),
            layers={name: matrix_shape(layer) for name, layer in layers.items()},
            default_rate=self.default_rate, seed=seed,
            autocast=autocast_dtype(self.autocast, model_device(subject.teacher)),
        )  # fmt: skip


def training_benchmarks(request: Request) -> list[TrainingBenchmark]:
    """Returns the benchmark of the request's configuration, or of the bench's own models, of which it may name one."""
    if request.config is not None:
        return [_config_benchmark(request.config, request)]
    if request.model is not None and request.model not in STEPS:
        raise FlexrankError(f"--model is {request.model!r}; this bench has {', '.join(STEPS)}, or any with --config")
    return [own_benchmark(name, request) for name in STEPS if request.model in (None, name)]


def find_training_benchmark(request: Request, name: str) -> TrainingBenchmark:
    """Returns the request's benchmark of this name."""
    return next(benchmark for benchmark in training_benchmarks(request) if benchmark.name == name)


def own_benchmark(name: str, request: Request) -> TrainingBenchmark:
    """Returns the benchmark of one of the bench's own models."""
    steps = STEPS[name][request.full]
    if name in NETWORKS:
        return _image_benchmark(name, steps, request)
    make = _sentence_benchmark if name == "all-MiniLM-L6-v2" else _language_benchmark
    return make(name, steps, request.full)


def _language_benchmark(name: str, steps: int, full: bool) -> TrainingBenchmark:
    texts = {one[0]: one for one in language.MODELS}[name]
    evaluation = language.EVALUATION if full else {"stories260k": 64, "pycode5m": 16, "babyllama": 64}[name]

    def subject_and_batches(seed: int, half: Half) -> tuple[Subject, Sequence[Batch]]:
        return language.subject_of(texts, half, seed=seed, evaluation=evaluation)

    facts = {"calibration": language.CALIBRATION, "probe": language.PROBE, "evaluation": evaluation}
    return TrainingBenchmark(
        name, "nats", 3, BUDGETS, steps, RATES[name], language.LEVELS, facts, subject_and_batches, language.FOLLOWED,
        LogitObjective(), next_token_loss, lambda model, teacher: hidden_states(model, teacher),
    )  # fmt: skip


def _sentence_benchmark(name: str, steps: int, full: bool) -> TrainingBenchmark:
    batch = sts.BATCH if full else 32

    def subject_and_batches(seed: int, half: Half) -> tuple[Subject, Sequence[Batch]]:
        return sts.subject_of(half, seed=seed, batch=batch)

    facts = {"calibration": sts.CALIBRATION, "probe": sts.PROBE, "docstrings": sts.DOCSTRINGS}
    facts["sentences_a_step"] = batch
    objectives = EmbeddingObjective(sts.HIDDEN_WEIGHT), EmbeddingObjective()
    return TrainingBenchmark(
        name, "cosine", 4, BUDGETS, steps, RATES[name], 10, facts, subject_and_batches, *objectives,
        None, lambda model, _: eager_attention(model),
    )  # fmt: skip


def _image_benchmark(name: str, steps: int, request: Request) -> TrainingBenchmark:
    def subject_and_batches(seed: int, half: Half) -> tuple[Subject, Sequence[Batch]]:
        return images.subject_of(name, request.work, half, seed=seed, is_full=request.full, steps=steps)

    facts = {"calibration": images.CALIBRATION, "probe": images.PROBE, "full": request.full}
    objective = LogitObjective()
    return TrainingBenchmark(
        name, "accuracy", 4, BUDGETS, steps, RATES[name], images.LEVELS, facts, subject_and_batches,
        objective, objective, None, images.computing,
    )  # fmt: skip


def _config_benchmark(config: RunConfig, request: Request) -> TrainingBenchmark:
    """Returns any transformer, in float32; trials use the tuning half."""
    settings = config.distillation
    require_comparable(config, request, TAKEN | TRAINING_KEYS)
    budgets = [budget for budget in config.allocation.budgets if budget < 1]
    if settings.steps < 2 * LEAST_STEPS * len(budgets):  # trials that train each size alone have half of the steps
        needed = f"a comparison trains sizes below 1, for at least {2 * LEAST_STEPS} steps each"
        raise FlexrankError(f"distillation.steps is {settings.steps}, for {len(budgets)} budgets below 1; {needed}")

    space = Workspace(config, RunDirectory(request.work))
    is_language = config.task == "language"
    # flexrank consolidates by its defaults here, whichever method the configuration names.
    followed = settings.model_copy(update={"method": "balanced"}).weight_of_hidden_states
    forward_context = {
        "language": lambda *models: hidden_states(*models),
        "embedding": lambda model, _: eager_attention(model),
    }
    facts = identity_of(config, ("task", "model", "seed", "data", "layers", "distillation"))
    facts |= task_measure(space, request)[1]
    return TrainingBenchmark(
        config.name, CONFIG_MEASURES[config.task], 4, budgets, settings.steps, settings.learning_rate or UNTRIED,
        config.probe.levels, facts, functools.partial(config_subject, request, config),
        space.objective(followed), space.objective(), next_token_loss if is_language else None,
        forward_context.get(config.task, lambda *_: contextlib.nullcontext()), settings.autocast,
    )  # fmt: skip
