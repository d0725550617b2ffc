"""What studies on causal language models share: a model, its data, its decomposition, its chain, its training.

Calibration, decomposition, probe and allocation are the stages of a run, in a run directory of their own: studies with
the same settings share it, and an interrupted study resumes from it.
"""

import contextlib
import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from flexrank import FlexrankError, RankProfile, use_profile
from flexrank.files import digest_json
from flexrank.hf import models
from flexrank.run import run_stages
from flexrank.run.config import RunConfig
from flexrank.run.directory import RunDirectory, data_identity, identity
from flexrank.run.fitting import require_fitting_inputs
from flexrank.run.stages import read_chain
from flexrank.run.training import autocast_dtype, train_
from flexrank.run.trials import UNTRIED
from flexrank.run.workspace import Workspace
from flexrank.version import __version__
from research.assets import asset_path
from research.experiment import Ledger, Request
from research.figures import draw_level, draw_seeds, panels
from research.measures import STORY_SEPARATOR
from research.result import table

#: The configuration that a decomposition and its probe depend on, and that a training depends on.
DECOMPOSED = ("task", "model", "dtype", "device", "seed", "data", "layers", "decomposition", "probe")
TRAINED = (*DECOMPOSED, "allocation", "distillation", "deployment")


def stories_settings(full: bool) -> dict[str, Any]:
    """Returns the settings of a run of stories260k on its stories; the full form has ten times the steps."""
    texts = {"path": str(asset_path("text", "tinystories_train_v2.txt"))}
    training = {"steps": 3000 if full else 300, "learning_rate": 2e-3, "warmup_steps": 15}
    return _settings("stories260k", texts | {"probe": 32, "max_tokens": 256, "evaluation": 64}, training)


def pycode_settings(**changes: Any) -> dict[str, Any]:
    """Returns the settings of a run of pycode5m on Python sources; `changes` are sections whose keys override these."""
    files = {"path": "train_sample.txt", "held_out": "val.txt"}
    texts = {key: str(asset_path("pycode5m", name)) for key, name in files.items()}
    training = {"steps": 150, "learning_rate": 3e-4, "warmup_steps": 10}
    settings = _settings("pycode5m", texts | {"probe": 16, "evaluation": 32, "max_tokens": 512}, training)
    return settings | {key: settings.get(key, {}) | keys for key, keys in changes.items()}


def draw_by_budget(data: Mapping[str, Any], colours: Sequence[str]) -> Any:
    """Draws held-out loss against budget: mean and range of each of `runs` (seeds, budgets), and the original's."""
    figure, (axes,) = panels()
    for (name, runs), colour in zip(data["runs"].items(), itertools.cycle(colours), strict=False):
        draw_seeds(axes, data["budgets"], runs, colour, name)
    draw_level(axes, data["dense"], "original")
    axes.set(xlabel="budget", ylabel="held-out nats per token")
    axes.legend(fontsize=8)
    return figure


def _settings(name: str, data: Mapping[str, Any], distillation: Mapping[str, Any]) -> dict[str, Any]:
    texts = {"source": "text", "half": "reporting", "separator": STORY_SEPARATOR, "batch_size": 8}
    texts |= {"calibration": 128, "training": 3000}
    return {
        "name": name, "task": "language", "model": str(asset_path(name)), "data": texts | dict(data),
        "probe": {"levels": 8, "spacing": "parameters"},
        "allocation": {"budgets": [0.8, 0.6, 0.4, 0.2], "min_saving": 0.0},
        "distillation": {"batch_size": 8, **distillation}, "deployment": {"slack": 0},
    }  # fmt: skip


def identity_of(config: RunConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Returns what a study's parts depend on: sections of a configuration, the files they name, flexrank's version."""
    sources = {"model": models.resolve_source(config.model), "held_out": config.data.held_out}
    files = {name: identity(path) for name, path in sources.items() if path is not None}
    files |= {"data": data_identity(config.data)}
    values = config.model_dump(mode="json", include=set(keys))
    return {**values, "files": files, "flexrank": __version__}


def checked_config(request: Request) -> RunConfig:
    """Returns the request's configuration, which must be of task `language`."""
    config = request.config
    assert config is not None
    if config.task != "language":
        raise FlexrankError(f"task is {config.task!r}; this study runs on causal language models, task 'language'")
    return config


def datasvd_space(request: Request) -> Workspace:
    """Returns the model, tokenizer and samples of the request's configuration, for a study of DataSVD; runs nothing."""
    config = request.config
    assert config is not None
    decomposition = config.decomposition
    if "method" in decomposition.model_fields_set and decomposition.method != "datasvd":
        raise FlexrankError(f"decomposition.method is {decomposition.method!r}; this study is of 'datasvd' only")
    config = config.model_copy(update={"decomposition": decomposition.model_copy(update={"method": "datasvd"})})
    space = Workspace(config, RunDirectory(request.work))
    require_fitting_inputs(space, space.base)
    return space


class LanguageBench:
    """A model, the chain of its decomposition, and how its submodels are trained and measured; budgets descend."""

    def __init__(self, request: Request):
        self.config = checked_config(request)
        self.work = request.work.parent
        self.space = self._allocated(self.config)
        self.base, self.chain = self.space.base, read_chain(self.space)
        self.budgets = list(self.config.allocation.budgets)
        self.profiles: list[RankProfile] = [self.chain.at(budget) for budget in self.budgets]
        self.steps = self.config.distillation.steps
        self.ledger = Ledger(request.work, identity_of(self.config, TRAINED))
        self.autocast = autocast_dtype(self.config.distillation.autocast, self.space.device)

    def _allocated(self, config: RunConfig) -> Workspace:
        key = digest_json(identity_of(config, DECOMPOSED))
        directory = self.work / "decomposed" / f"{config.name}-{key[:12]}"
        return run_stages(config.model_copy(update={"output": str(directory)}), "allocate").workspace

    def decomposed(self) -> nn.Module:
        """Returns a fresh, untrained elastic model."""
        return self.space.elastic("elastic_initial")[0]

    def nats(self, model: nn.Module, profile: RankProfile | None = None) -> float:
        """Returns held-out nats per token, for an elastic model at this profile."""
        with use_profile(model, profile) if profile else contextlib.nullcontext():
            return self.space.measure_quality(model)["nats_per_token"]

    def nats_by_budget(self, model: nn.Module) -> list[float]:
        """Returns held-out nats per token at each budget's profile."""
        return [self.nats(model, profile) for profile in self.profiles]

    def untrained(self) -> dict[str, list[list[float]]]:
        """Returns held-out nats per token by budget of plain SVD and of the decomposition, each with its own ranks."""
        return {
            "SVD, untrained": [self.ledger.take("svd", self._plain_svd)],
            "untrained": [self.ledger.take("untrained", lambda: self.nats_by_budget(self.decomposed()))],
        }

    def _plain_svd(self) -> list[float]:
        decomposition = self.config.decomposition.model_copy(update={"method": "svd"})
        space = self._allocated(self.config.model_copy(update={"decomposition": decomposition}))
        model, chain = space.elastic("elastic_initial")[0], read_chain(space)
        return [self.nats(model, chain.at(budget)) for budget in self.budgets]

    def dense(self) -> float:
        """Returns held-out nats per token of the base model."""
        return self.ledger.take("dense", lambda: self.nats(self.base))

    def trained(self, profiles: Sequence[Mapping[str, int]], *, steps: int, seed: int, name: str | Path) -> nn.Module:
        """Returns a fresh elastic model distilled at these profiles; an interrupted training resumes, by its name."""
        model, path = self.decomposed(), self.ledger.directory / name
        self.train_(model, profiles, steps, path, seed=seed)
        return model

    def table(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Returns a table of nats per token by budget, for trainings of the configured length."""
        title = f"{self.config.name}, {self.steps} steps each (original {self.dense():.3f})"
        return table(f"Held-out nats per token by budget: {title}", ["", *self.budgets], rows)

    def train_(
        self, model: nn.Module, profiles: Sequence[Mapping[str, int]], steps: int, checkpoint: Path, **options: Any
    ) -> None:
        """Distils a model in place as configured; `options` are passed to `distill_`."""
        settings = self.config.distillation
        # The configured weights are for all profiles, from the largest, as budgets are.
        given = settings.weights[::-1] if settings.weights and len(profiles) == len(self.profiles) else None
        rate = settings.learning_rate or UNTRIED
        train_(self.space, model, list(profiles), steps, rate, checkpoint, given, **options)
        shutil.rmtree(checkpoint)

    def consolidated(self, seeds: int) -> list[list[float]]:
        """Returns each seed's nats per token by budget, of the elastic model trained for all; studies share them."""
        ledger = Ledger(self.work / "consolidated", identity_of(self.config, TRAINED))

        def compute(seed: int) -> list[float]:
            path = ledger.directory / f"training-{seed}"
            return self.nats_by_budget(self.trained(self.profiles[::-1], steps=self.steps, seed=seed, name=path))

        with RunDirectory(ledger.directory).locked():
            return ledger.take_seeds("elastic", seeds, compute)

    def facts(self, **more: Any) -> dict[str, Any]:
        """Returns the settings that a result shows."""
        data, training = self.config.data, self.config.distillation
        return {
            "model": self.config.name, "data": Path(data.path or data.source).name,
            "tokens_a_sample": data.max_tokens, "calibration": data.calibration, "evaluation": data.evaluation,
            "budgets": self.budgets, "steps": training.steps,
            "samples_a_step": training.batch_size * training.accumulation,
            "decomposition": self.config.decomposition.method,
            "method": training.method, "optimizer": training.optimizer,
            "learning_rate": training.learning_rate or UNTRIED,
            "autocast": str(self.autocast), "device": str(self.space.device),
        } | more  # fmt: skip
