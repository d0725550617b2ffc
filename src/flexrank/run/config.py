"""The configuration of a run: a YAML file and `--set key=value` overrides in, a frozen `RunConfig` out."""

import copy
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import yaml
from pydantic import Field

from flexrank.errors import FlexrankError, short_repr
from flexrank.run.config_file import read_config_file
from flexrank.run.data_config import Count, DataConfig, LocalPath, Section

if TYPE_CHECKING:
    import torch

Budget = Annotated[float, Field(gt=0, le=1)]


def _distinct_and_falling(budgets: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(budgets)) != len(budgets):
        raise ValueError("it has a budget twice")
    return tuple(sorted(budgets, reverse=True))


Budgets = Annotated[tuple[Budget, ...], pydantic.AfterValidator(_distinct_and_falling)]
Dtype = Literal["float32", "bfloat16", "float16"]


class LayersConfig(Section):
    """Which layers are factorised: names, globs, or parts between dots such as lm_head; see `select_layers`."""

    include: tuple[str, ...] | None = None  # None is every linear layer and convolution that can be factorised
    exclude: tuple[str, ...] = ()  # those of them that stay dense


class DecompositionConfig(Section):
    """How a weight becomes factors (FlexRank, section 3.1)."""

    # `fisher` weights outputs by the loss's gradients, which takes a backward pass; `datasvd` weights all equally.
    method: Literal["datasvd", "paper", "svd", "fisher"] = "fisher"
    # The model is decomposed one block at a time. Hidden states between blocks take at most this much memory, and
    # finished factors about a quarter of it, or 256 MiB if that is less; the rest is on disk.
    buffer_bytes: Annotated[int, Field(ge=2**20)] = 2**31


class ProbeConfig(Section):
    """How each layer's sensitivity is measured, and how finely; see `profiles.costs.rank_levels`."""

    # `loss` measures the distillation loss with one layer truncated at a time; `curvature` predicts it from moments of
    # activations and gradients, block by block, without a forward pass of the model: for models larger than memory.
    method: Literal["loss", "curvature"] = "loss"
    levels: Annotated[int, Field(ge=2)] = 10  # ranks per layer, including full rank
    # Probed ranks are evenly spaced in `parameters` or in `ranks`; `blocks` spaces them in parameters and rounds down
    # to whole blocks, at which wide products are fast.
    spacing: Literal["blocks", "parameters", "ranks"] = "blocks"
    # Most bytes of the teacher's outputs that are kept: logits of all classes if they fit, otherwise of as many of the
    # likeliest as fit, with all others as one class. `allocation.method: paper` keeps all, as printed.
    target_bytes: Count = 2**30
    # Most bytes of the full model's outputs that are kept, so what runs before a probed layer does not run again:
    # those of a block and, if they also fit, of the next block's modules. If none fit, the probe takes twice as long,
    # with the same result.
    replay_bytes: Annotated[int, Field(ge=0)] = 2**30


class AllocationConfig(Section):
    """How ranks are chosen, and for which budgets (deployed over dense parameters of the factorised layers)."""

    method: Literal["joint", "paper"] = "joint"  # all budgets together, or the paper's algorithm as printed
    # What method `paper` counts: deployed parameters, or ranks, as printed.
    savings: Literal["parameters", "ranks"] = "parameters"
    # A factorised layer saves at least this share of the dense layer's operations, or stays dense; not for `paper`.
    min_saving: Annotated[float, Field(ge=0, lt=1)] = 0.25
    budgets: Annotated[Budgets, Field(min_length=1)] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # each once


class DistillationConfig(Section):
    """Knowledge consolidation: every step draws one budget and distils its submodel (FlexRank, section 3.3)."""

    method: Literal["balanced", "paper"] = "balanced"  # `paper`: as printed, which degrades the largest sizes
    steps: Annotated[int, Field(ge=0)] = 400  # of the optimiser; 0 leaves the decomposed network as it is
    # The peak, from which it falls to 0 along a cosine. None: short trials choose it, or it is 1e-4 below 200 steps.
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    warmup_steps: Annotated[int, Field(ge=0)] = 20  # over which the learning rate rises from 0; at most half of `steps`
    batch_size: Count = 32  # samples per pass
    accumulation: Count = 1  # passes per step
    # The relative chance of each of `allocation.budgets`, from the largest to the smallest; None means equal chances,
    # and with `balanced` twice that for the largest below 1. `balanced` never draws budget 1 if there are others.
    weights: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # of AdamW, for matrices only
    # Weight of the last hidden states' error, beside the divergence (language) or the cosine distance of texts
    # (embedding); None is 4, or 0 with `paper`, which has no such term.
    hidden_weight: Annotated[float, Field(ge=0)] | None = None
    autocast: Literal["auto", "off", "bfloat16"] = "auto"  # `auto`: bfloat16 where the hardware computes in it
    # `adamw` takes 16 bytes for each trained number, including its gradient, and `adamw_8bit` 10; with `dtype` bfloat16
    # 8 and 6. All except the first need torchao.
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    gradient_checkpointing: bool = False  # reruns blocks in the backward pass: less memory, a third more time
    # With several processes, each holds a part of both models and of all training state, not the whole; needs
    # gradient_checkpointing, without which blocks would keep the factors they gather.
    sharded: bool = False
    checkpoint_every: Count = 100  # steps between the checkpoints that an interrupted run resumes from
    max_norm: Annotated[float, Field(gt=0)] = 1.0  # of all gradients together, which are clipped to it
    temperature: Annotated[float, Field(gt=0)] = 1.0  # of the softmax in the language and classification losses
    # `tensorboard` also writes each size's loss to RUN/tensorboard during training; RUN/losses.jsonl always has them.
    tracking: Literal["tensorboard"] | None = None
    # To save memory, the language and classification losses distinguish only this many of the teacher's likeliest
    # classes; all others count as one.
    top_k: Count | None = None

    @pydantic.model_validator(mode="after")
    def _sharded_as_it_can_be(self) -> "DistillationConfig":
        if self.sharded and not self.gradient_checkpointing:
            raise ValueError(
                "sharded needs gradient_checkpointing: true; without it blocks hold what they have gathered"
            )
        if self.sharded and self.optimizer != "adamw":
            raise ValueError(f"sharded needs optimizer: adamw, whose states are divided, not {self.optimizer}")
        return self

    @property
    def weight_of_hidden_states(self) -> float:
        """`hidden_weight`, or the method's default."""
        if self.hidden_weight is None:
            return 4.0 if self.method == "balanced" else 0.0
        return self.hidden_weight

    @pydantic.field_validator("autocast", mode="before")
    @classmethod
    def _off_is_no_truth_value(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false


class DeploymentConfig(Section):
    """Which sizes are exported to RUN/deployed/BUDGET, each verified in a fresh process."""

    budgets: Budgets | None = None  # each once, or none; None is the middle one of `allocation.budgets`
    # Of the exported weights; None is the narrower of the run's `dtype` and that of the base model's files.
    dtype: Dtype | None = None
    slack: Literal["auto"] | int = "auto"  # columns left unaligned; `auto` chooses them by the dtype's error bound

    @pydantic.field_validator("slack", mode="before")
    @classmethod
    def _auto_or_columns(cls, slack: object) -> object:
        if slack != "auto" and (not isinstance(slack, int) or isinstance(slack, bool) or slack < 0):
            raise ValueError("it is 'auto' or a whole number of columns, 0 or more")
        return slack


class EvaluationConfig(Section):
    """Whether and how often each deployed size is timed against the base model, alternately on one batch."""

    latency: bool = True  # whether sizes are timed
    latency_batch_size: Count = 16  # samples in the batch for timing and for verifying exports
    latency_repeats: Count = 15  # fewest timed runs of each size, lasting a second at least; the table has the median


class RunConfig(Section):
    """The configuration of a run. Only `name`, `task` and `model` are required."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # letters, digits and any of . _ -
    task: Literal["embedding", "language", "classification"]  # decides the batches, the distillation loss and qualities
    model: Annotated[str, Field(min_length=1)]  # a directory, from the current one; a hub name; `package:NAME/PATH`
    # A transformers config.json that a dry run reads in place of the model's own, which it gets from the hub.
    architecture: LocalPath | None = None
    # Of the elastic weights; bfloat16 takes half the memory, and is trained with stochastic rounding. The base model
    # keeps its files' dtype.
    dtype: Dtype = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # `auto`: a GPU if there is one
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # for the order of samples, and for the budget that each step draws
    output: LocalPath = "runs/{name}"  # the run directory, relative to the current one
    data: DataConfig = DataConfig()
    layers: LayersConfig = LayersConfig()
    decomposition: DecompositionConfig = DecompositionConfig()
    probe: ProbeConfig = ProbeConfig()
    allocation: AllocationConfig = AllocationConfig()
    distillation: DistillationConfig = DistillationConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @pydantic.model_validator(mode="after")
    def _agrees(self) -> "RunConfig":
        for conflict in self._conflicts():
            raise ValueError(conflict)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Yields one line for each conflict between keys."""
        source, allocation, weights = self.data.source, self.allocation, self.distillation.weights
        yield from self.data.conflicts()
        if (source == "images") != (self.task == "classification"):
            yield f"data.source {source!r} does not fit task {self.task!r}: only classification reads images"
        if weights is not None and len(weights) != len(allocation.budgets):
            yield f"distillation.weights has {len(weights)} numbers; allocation.budgets has {len(allocation.budgets)}"
        if self.distillation.steps and self.distillation.method == "balanced" and allocation.budgets == (1.0,):
            yield "allocation.budgets has only 1, the base model itself; add a smaller size"
        if self.distillation.steps and self.dtype == "float16":
            right = "take bfloat16, or keep float32 with deployment.dtype float16"
            yield f"dtype 'float16' cannot be consolidated; {right}"
        if self.task == "classification" and self.distillation.hidden_weight:
            yield "distillation.hidden_weight is of hidden states, which task 'classification' does not follow"
        if self.task == "embedding" and (self.distillation.top_k is not None or self.distillation.temperature != 1):
            yield "distillation.top_k and temperature are of classes' likelihoods, which task 'embedding' does not have"
        if allocation.method == "joint" and allocation.savings == "ranks":
            yield "allocation.savings 'ranks' belongs to allocation.method 'paper'; 'joint' has parameters"
        if allocation.method == "paper" and allocation.min_saving not in (0, AllocationConfig().min_saving):
            yield f"allocation.min_saving {allocation.min_saving:g} belongs to method 'joint', not to 'paper'"

    @property
    def deployed_budgets(self) -> tuple[float, ...]:
        """`deployment.budgets`, or else the middle one of `allocation.budgets`, the smaller of two."""
        trained = self.allocation.budgets
        return (trained[len(trained) // 2],) if self.deployment.budgets is None else self.deployment.budgets

    @property
    def keeps_input_moments(self) -> bool:
        """Whether every layer's moment is that of its input; otherwise that of its output, where that is less work."""
        return self.decomposition.method == "paper" or self.probe.method == "curvature"

    @property
    def keeps_gradient_moments(self) -> bool:
        """Whether moments of the loss's gradients at every layer's output are collected too."""
        return self.decomposition.method == "fisher" or self.probe.method == "curvature"

    @property
    def needs_torchao(self) -> bool:
        """Whether consolidation needs an optimiser that torch itself does not have."""
        return bool(self.distillation.steps) and (self.distillation.optimizer, self.dtype) != ("adamw", "float32")

    def narrow_dtype(self, files: "torch.dtype") -> "torch.dtype":
        """The narrower of the run's `dtype` and the dtype `files` of the base model's files."""
        import torch

        return min(getattr(torch, self.dtype), files, key=lambda dtype: dtype.itemsize)

    def deployed_dtype(self, files: "torch.dtype") -> "torch.dtype":
        """The dtype of exported weights, for a base model whose files have dtype `files`."""
        import torch

        return getattr(torch, self.deployment.dtype) if self.deployment.dtype else self.narrow_dtype(files)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.output.replace("{name}", self.name))


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a YAML file, or the `config.yaml` of a run directory, and applies `key=value` overrides.

    `output` of a run directory becomes that directory, so a moved run continues where it is.

    Raises:
        FlexrankError: the file is missing or not a YAML mapping, or a key or value is wrong; one line that names it.
    """
    path = Path(path)
    file = path / "config.yaml" if path.is_dir() else path
    if not file.is_file():
        what = "is not a run directory: it has no config.yaml" if path.is_dir() else "no such config file"
        if (path / "elastic.json").is_file():
            what += "; of an elastic artefact `flexrank deploy` writes a size, and `flexrank inspect` lists them"
        raise FlexrankError(f"{path}: {what}")
    value = read_config_file(file)
    if path.is_dir():
        value["output"] = str(path)
        if isinstance(value.get("decomposition"), dict):
            value["decomposition"].pop("by_block", None)  # a key of earlier versions; now it is always on
    return parse_config(value, str(file), overrides)


def parse_config(value: Mapping[str, Any], where: str = "config", overrides: Iterable[str] = ()) -> RunConfig:
    """Applies `key=value` overrides to a mapping, checks it and freezes it.

    Raises:
        FlexrankError: a key is unknown or missing, or a value is wrong; one line that begins with `where`.
    """
    changed = copy.deepcopy(dict(value))
    for override in overrides:
        _override(changed, override)
    try:
        return RunConfig.model_validate(changed)
    except pydantic.ValidationError as error:
        raise FlexrankError(f"{where}: {_first_line(error)}") from error


def write_config(config: RunConfig, path: str | Path) -> None:
    """Writes the whole configuration, defaults included, as YAML from which `load_config` reads the same one."""
    Path(path).write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf8")


def _override(value: dict[str, Any], override: str) -> None:
    """Applies one `a.b=value` in place; the value is YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise FlexrankError(f"--set {override!r}: write KEY=VALUE, for example --set distillation.steps=100")
    *parents, last = key.strip().split(".")
    for parent in parents:
        if value.get(parent) is None:  # missing, or with nothing in it
            value[parent] = {}
        value = value[parent]
        if not isinstance(value, dict):
            raise FlexrankError(f"--set {override!r}: {parent!r} is a value, not a section with keys")
    try:
        value[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FlexrankError(f"--set {override!r}: the value is not YAML") from error


def _first_line(error: pydantic.ValidationError) -> str:
    """The first problem in one line; unknown keys come first, because a misspelt key is also a missing one."""
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    key, kind = ".".join(map(str, problem["loc"])), problem["type"]
    given = "null" if problem["input"] is None else short_repr(problem["input"])
    message = problem["msg"][0].lower() + problem["msg"][1:]
    if kind == "extra_forbidden":
        return f"unknown key {key!r}; {_suggestion(key)}"
    if kind == "missing":
        return f"key {key!r} is missing"
    if kind == "model_type":
        message = f"it is a section with keys {', '.join(one for one in known_keys() if one.startswith(f'{key}.'))}"
    if kind == "value_error":
        message = str(problem["ctx"]["error"])
        if key and isinstance(problem["input"], Mapping):  # two keys of a section
            return f"{key}: {message}"
    if kind == "tuple_type":
        message = "input should be a list in brackets"
    return f"{key} is {given}; {message}" if key else message


def _suggestion(key: str) -> str:
    """A hint for an unknown key: the closest known one, of the same section or of any, or else the section's keys."""
    parent, _, last = key.rpartition(".")
    names = list(known_keys())
    siblings = [name for name in names if name.rpartition(".")[0] == parent]
    for candidates in (siblings, names):
        by_last = {name.rpartition(".")[2]: name for name in reversed(candidates)}
        if close := difflib.get_close_matches(last, by_last, n=1):
            return f"did you mean {by_last[close[0]]!r}?"
    return f"{parent or 'the config'} has {', '.join(name.rpartition('.')[2] for name in siblings)}"


def known_keys(section: type[pydantic.BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration, dotted, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from known_keys(field.annotation, f"{prefix}{name}.")
