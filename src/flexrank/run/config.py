"""The configuration of a run: a YAML file and `--set key=value` overrides in, a frozen `RunConfig` out.

Every wrong key or value is one line that names it, says what was given and what would be right. The core takes flat
arguments and knows nothing of this module; only the pipeline and the command line do.
"""

import copy
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import Field

from flexrank.errors import FlexrankError

Budget = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


class Section(pydantic.BaseModel):
    """A part of the configuration: frozen, and closed to unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataConfig(Section):
    """What is read, and how much of it each stage sees. A sample is a text, a block of tokens, or an image.

    Attributes:
        source: `stdlib-docs` (documentation of Python's own standard library), `text` (a UTF-8 file or a folder of
            them), or `images` (an .npz file with classes `y`, and uint8 `x`, (N, H, W) or (N, H, W, C), or in place
            of `x` JPEG files, as `images.read_images` tells).
        path: what `text` or `images` reads; relative to the current directory.
        held_out: of `text`, another file or folder whose texts are the evaluation's; None takes the last quarter of
            `path` for it.
        separator: what divides a file of `text` into texts; None is a line end for embeddings, and for language no
            division: one running text.
        calibration: at most so many samples for the moments. They and the next three are fewer where there are fewer.
        probe: samples that one probe evaluates.
        training: samples that consolidation draws from.
        evaluation: samples that the table's qualities are measured on (of `stdlib-docs`: pairs of a docstring's first
            paragraph and its remainder); no other stage sees them.
        max_tokens: tokens a text is cut to (embedding), or a block holds (language).
        batch_size: samples a forward pass takes outside training.
    """

    source: Literal["stdlib-docs", "text", "images"] = "stdlib-docs"
    path: str | None = None
    held_out: str | None = None
    separator: Annotated[str, Field(min_length=1)] | None = None
    calibration: Count = 1024
    probe: Count = 192
    training: Count = 4096
    evaluation: Count = 512
    max_tokens: Annotated[int, Field(ge=2)] = 128
    batch_size: Count = 32


class LayersConfig(Section):
    """Which layers are factorised: names, globs, or parts between dots such as lm_head, as `select_layers` has it."""

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()


class DecompositionConfig(Section):
    """How a weight becomes factors (FlexRank, section 3.1).

    Attributes:
        method: of the factorisation.
        by_block: calibrate and factorise one block of the model's stack at a time: one block's moments stand in memory
            at once, for about half as many more forwards over the calibration data as there are blocks.
    """

    method: Literal["datasvd", "paper", "svd", "fisher"] = "datasvd"
    by_block: bool = False


class ProbeConfig(Section):
    """How finely sensitivity is probed.

    Attributes:
        levels: ranks a layer, the last one full.
        spacing: `parameters` has them even in parameters, `blocks` the same rounded down to whole blocks of up to 32,
            which hardware multiplies faster, `ranks` even in ranks, as the paper.
    """

    levels: Annotated[int, Field(ge=2)] = 10
    spacing: Literal["blocks", "parameters", "ranks"] = "blocks"


class AllocationConfig(Section):
    """How ranks are chosen, and for which budgets (deployed over dense parameters of the factorised layers).

    Attributes:
        method: `joint` solves all budgets together, `paper` is the printed algorithm.
        savings: what `paper` counts.
        candidates_per_layer: about how many ranks `joint` chooses among in each layer, between the probed ones; None
            keeps to the probed ones.
        budgets: in falling order, whatever order they are given in.
    """

    method: Literal["joint", "paper"] = "joint"
    savings: Literal["parameters", "ranks"] = "parameters"
    candidates_per_layer: Annotated[int, Field(ge=2)] | None = None
    budgets: Annotated[tuple[Budget, ...], Field(min_length=1)] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

    @pydantic.field_validator("budgets")
    @classmethod
    def _distinct_and_falling(cls, budgets: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(budgets)) != len(budgets):
            raise ValueError("each budget may stand once")
        return tuple(sorted(budgets, reverse=True))


class DistillationConfig(Section):
    """Knowledge consolidation: every step draws one budget and distils its submodel (FlexRank, section 3.4).

    Attributes:
        steps: optimiser steps; 0 leaves the decomposed network as it is.
        weights: chance of each of `allocation.budgets`, from the largest to the smallest; None draws them alike.
        hidden_weight: of the tokens' relative error beside the cosine (embedding): there is more to learn in a text's
            tokens than in its one embedding, and every size is better for it.
        autocast: `auto` takes bfloat16 where the hardware computes in it, `off` stays in the model's dtype.
        checkpoint_every: steps between two checkpoints that an interrupted run goes on from.
        temperature: of the softmax in the language and classification losses.
        top_k: of the teacher's classes those losses tell apart, the likeliest; all others count as one. None tells
            all apart; a number lets far more of the teacher's outputs be kept from one pass to the next.
    """

    steps: Annotated[int, Field(ge=0)] = 400
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    batch_size: Count = 32
    accumulation: Count = 1
    weights: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    hidden_weight: Annotated[float, Field(ge=0)] = 4.0
    autocast: Literal["auto", "off", "bfloat16"] = "auto"
    checkpoint_every: Count = 100
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_k: Count | None = None


class DeploymentConfig(Section):
    """What is exported, verified in a fresh process, to RUN/deployed/BUDGET.

    Attributes:
        budgets: one export each; may be empty.
        dtype: of the exported weights; None keeps the model's.
        slack: rows left out of gauge alignment; `auto` chooses it by the stated error bound of the dtype.
        forms: of the layers. `measured` times them on this machine, once, so that no size is slower than the base:
            with `joint` allocation each layer's rank is chosen anew with its form, by the probe; where a latency is
            asked for it takes the quickest. `smallest` takes those with fewest parameters at the chain's ranks, for a
            machine that is not this one; `quickest` those that take least time here, of lower rank at a budget.
    """

    budgets: tuple[Budget, ...] = (0.5, 0.25)
    dtype: Dtype | None = None
    slack: Literal["auto"] | int = "auto"
    forms: Literal["measured", "smallest", "quickest"] = "measured"

    @pydantic.field_validator("slack", mode="before")
    @classmethod
    def _auto_or_rows(cls, slack: object) -> object:
        if slack != "auto" and (not isinstance(slack, int) or isinstance(slack, bool) or slack < 0):
            raise ValueError("it is 'auto' or a whole number of rows, 0 or more")
        return slack


class EvaluationConfig(Section):
    """What the table measures beside quality.

    Attributes:
        latency: whether each deployed size is timed against the base, on the same batch, in turn.
        latency_batch_size: samples in that batch.
        latency_repeats: timings of each, more where they take less than a second; the median of their ratios is kept.
    """

    latency: bool = True
    latency_batch_size: Count = 16
    latency_repeats: Count = 15


class RunConfig(Section):
    """A whole run. Only `name`, `task` and `model` must be given.

    Attributes:
        name: of the run; `output` defaults to runs/NAME.
        task: what the model does, which decides the batches, the distillation loss and the qualities in the table.
        model: a directory, a model's name on the hub, or `package:PACKAGE/PATH` for weights in an installed package.
        architecture: a transformers config.json, relative to the current directory, that a dry run builds in place of
            the model's own, so that nothing is downloaded; a real run does not read it.
        dtype: of the weights and the computation; what is consolidated must be float32.
        device: `auto` takes a GPU where there is one.
        seed: of every draw.
        output: the run directory, relative to the current one; `{name}` stands for the name.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    task: Literal["embedding", "language", "classification"]
    model: Annotated[str, Field(min_length=1)]
    architecture: Annotated[str, Field(min_length=1)] | None = None
    dtype: Dtype = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Annotated[int, Field(ge=0)] = 0
    output: str = "runs/{name}"
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
        source, path = self.data.source, self.data.path
        if source != "stdlib-docs" and path is None:
            raise ValueError(f"data.path is missing: data.source {source!r} reads a file, so give its path")
        if source != "text" and self.data.held_out is not None:
            raise ValueError(f"data.held_out belongs to data.source 'text'; data.source is {source!r}")
        if (source == "images") != (self.task == "classification"):
            raise ValueError(
                f"data.source {source!r} does not fit task {self.task!r}: only classification reads images"
            )
        weights, budgets = self.distillation.weights, self.allocation.budgets
        if weights is not None and len(weights) != len(budgets):
            raise ValueError(f"distillation.weights has {len(weights)} numbers; allocation.budgets has {len(budgets)}")
        if self.distillation.steps and self.dtype != "float32":
            raise ValueError(
                f"dtype {self.dtype!r} cannot be consolidated; keep float32, with distillation.autocast bfloat16 "
                f"and deployment.dtype {self.dtype}"
            )
        if self.allocation.method == "joint" and self.allocation.savings == "ranks":
            raise ValueError("allocation.savings 'ranks' belongs to allocation.method 'paper'; 'joint' has parameters")
        return self

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.output.replace("{name}", self.name))


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a YAML file, or the `config.yaml` of a run directory, and applies `key=value` overrides.

    A run directory's own place wins over the `output` it was made with, so that a moved run goes on where it is.

    Raises:
        FlexrankError: the file is missing or no YAML mapping, or a key or value is wrong; one line that names it.
    """
    path = Path(path)
    is_run_directory = path.is_dir()
    file = path / "config.yaml" if is_run_directory else path
    if not file.is_file():
        what = "is no run directory, it has no config.yaml" if is_run_directory else "no such config file"
        raise FlexrankError(f"{path}: {what}")
    try:
        value = yaml.safe_load(file.read_text(encoding="utf8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FlexrankError(f"{file}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(value, dict):
        raise FlexrankError(f"{file}: holds {_shown(value)}; a config is a mapping of keys such as name, task, model")
    if is_run_directory:
        value["output"] = str(path)
    for override in overrides:
        _override(value, override)
    return parse_config(value, where=str(file))


def parse_config(value: Mapping[str, Any], where: str = "config") -> RunConfig:
    """Checks a mapping and freezes it.

    Raises:
        FlexrankError: a key is unknown or missing, or a value is wrong; one line that begins with `where`.
    """
    try:
        return RunConfig.model_validate(value)
    except pydantic.ValidationError as error:
        raise FlexrankError(f"{where}: {_first_line(error)}") from error


def parse_overridden(value: Mapping[str, Any], overrides: Iterable[str], where: str) -> RunConfig:
    """Checks a mapping with `key=value` overrides applied; as `load_config`, without a file."""
    changed = copy.deepcopy(dict(value))
    for override in overrides:
        _override(changed, override)
    return parse_config(changed, where=where)


def write_config(config: RunConfig, path: str | Path) -> None:
    """Writes the whole configuration, defaults included, as YAML that `load_config` reads back to the same."""
    Path(path).write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf8")


def _override(value: dict[str, Any], override: str) -> None:
    """Applies one `a.b=value` in place; the value is YAML."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise FlexrankError(f"--set {override!r}: write KEY=VALUE, for example --set distillation.steps=100")
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FlexrankError(f"--set {override!r}: the value is not YAML") from error
    *parents, last = key.split(".")
    section = value
    for parent in parents:
        inner = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise FlexrankError(f"--set {override!r}: {parent!r} is a value, not a section with keys")
        section = inner
    section[last] = parsed


def _first_line(error: pydantic.ValidationError) -> str:
    """The first finding as one line; unknown keys first, for a misspelt key is also a missing one."""
    findings = sorted(error.errors(), key=lambda finding: finding["type"] != "extra_forbidden")
    finding = findings[0]
    key = ".".join(map(str, finding["loc"]))
    given, message = finding["input"], finding["msg"]
    if finding["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_suggestion(key)}"
    if finding["type"] == "missing":
        return f"key {key!r} is missing"
    if finding["type"] == "model_type":
        keys = ", ".join(name for name in known_keys() if name.startswith(f"{key}."))
        return f"{key} is {_shown(given)}; it is a section with keys {keys}"
    if finding["type"] == "value_error":
        message = str(finding["ctx"]["error"])
        if not key:
            return message
    elif finding["type"] == "tuple_type":
        message = "input should be a list in brackets"
    return f"{key} is {_shown(given)}; {message[0].lower()}{message[1:]}"


def _suggestion(key: str) -> str:
    """What the misspelt `key` may have meant."""
    parent = key.rpartition(".")[0]
    siblings = [name for name in known_keys() if name.rpartition(".")[0] == parent]
    for names in (siblings, known_keys()):
        close = difflib.get_close_matches(key, names, n=1)
        if close:
            return f"did you mean {close[0]!r}?"
    last = key.rpartition(".")[2]
    moved = [name for name in known_keys() if name.rpartition(".")[2] == last]
    if moved:
        return f"did you mean {moved[0]!r}?"
    return f"{parent or 'the config'} has {', '.join(name.rpartition('.')[2] for name in siblings)}"


def known_keys() -> list[str]:
    """Every key of the configuration, dotted, sections included."""
    return list(_keys_of(RunConfig, ""))


def _keys_of(section: type[pydantic.BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _keys_of(field.annotation, f"{prefix}{name}.")


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
