"""What the studies on causal language models share: a model, its data, its decomposition, its chain, its training.

Calibration, decomposition, probe and allocation are the stages of a run, in a run directory of their own: studies of
the same settings share it, and an interrupted one goes on from it.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from flexrank.deployment.environment import assets_directory
from torch import nn

from flexrank.data.text import STORY_SEPARATOR
from flexrank.distill import distill_
from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.nn.switch import use_profile
from flexrank.profiles import RankProfile
from flexrank.run import run_stages
from flexrank.run.config import RunConfig
from flexrank.run.directory import RunDirectory, identity
from flexrank.run.stages import autocast_dtype, read_chain, require_fitting_inputs
from flexrank.run.workspace import Workspace
from research.studies.study import Ledger, Request

#: What a decomposition and its probe depend on, and what a training does.
DECOMPOSED = ("task", "model", "dtype", "device", "seed", "data", "layers", "decomposition", "probe")
TRAINED = (*DECOMPOSED, "allocation", "distillation")


def stories_settings(**changes: Any) -> dict[str, Any]:
    """The settings of a run of stories260k on its stories; `changes` are sections, their keys laid over these."""
    texts = {"path": str(assets_directory() / "text" / "tinystories_train_v2.txt"), "probe": 32, "max_tokens": 256}
    training = {"steps": 300, "learning_rate": 1e-3, "warmup_steps": 15}
    return _settings("stories260k", texts | {"evaluation": 64}, training, changes)


def pycode_settings(**changes: Any) -> dict[str, Any]:
    """The settings of a run of pycode5m on Python sources; `changes` are sections, their keys laid over these."""
    folder = assets_directory() / "pycode5m"
    files = {"path": str(folder / "train_sample.txt"), "held_out": str(folder / "val.txt")}
    training = {"steps": 150, "learning_rate": 3e-4, "warmup_steps": 10}
    return _settings("pycode5m", files | {"probe": 16, "evaluation": 32, "max_tokens": 512}, training, changes)


def _settings(
    name: str, data: Mapping[str, Any], distillation: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    texts = {"source": "text", "separator": STORY_SEPARATOR, "calibration": 128, "training": 3000, "batch_size": 8}
    settings: dict[str, Any] = {
        "name": name,
        "task": "language",
        "model": str(assets_directory() / name),
        "data": texts | dict(data),
        "probe": {"levels": 8, "spacing": "parameters"},
        "allocation": {"budgets": [0.8, 0.6, 0.4, 0.2]},
        "distillation": {"batch_size": 8, **distillation},
    }
    return settings | {key: {**settings.get(key, {}), **keys} for key, keys in changes.items()}


def told_apart(config: RunConfig, keys: Sequence[str]) -> dict[str, Any]:
    """What units of work depend on: parts of a configuration, the files that they name, and flexrank's version."""
    read = {"model": models.resolve_source(config.model), "data": config.data.path, "held_out": config.data.held_out}
    files = {name: identity(path) for name, path in read.items() if path is not None}
    values = config.model_dump(mode="json", include=set(keys))
    return {**values, "files": files, "flexrank": metadata.version("flexrank")}


def checked_config(request: Request) -> RunConfig:
    """The request's configuration.

    Raises:
        FlexrankError: it is of another task.
    """
    config = request.config
    assert config is not None
    if config.task != "language":
        raise FlexrankError(f"task is {config.task!r}; this study runs on causal language models, task 'language'")
    return config


def checked_datasvd(request: Request) -> RunConfig:
    """The request's configuration, of a study that is about DataSVD.

    Raises:
        FlexrankError: it decomposes otherwise, or is of another task.
    """
    config = checked_config(request)
    if config.decomposition.method != "datasvd":
        raise FlexrankError(
            f"decomposition.method is {config.decomposition.method!r}; this study is of 'datasvd' alone"
        )
    return config


def load_space(request: Request) -> Workspace:
    """The model, tokenizer and samples of the request's configuration; nothing is run."""
    space = Workspace(checked_config(request), RunDirectory(request.work))
    require_fitting_inputs(space)
    return space


class LanguageBench:
    """A model, the chain of its DataSVD, and how its submodels are trained and measured.

    Attributes:
        config: the run's.
        budgets: falling.
        profiles: of the budgets, in their order.
        space: the run's workspace: base, tokenizer, samples.
    """

    def __init__(self, request: Request):
        config = checked_config(request)
        # A study's sizes are those of every machine, not of this one's clock.
        forms = config.deployment.model_copy(update={"forms": "smallest"})
        self.config = config.model_copy(update={"deployment": forms})
        values = told_apart(self.config, DECOMPOSED)
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
        directory = request.work.parent / "decomposed" / f"{self.config.name}-{digest}"
        self.space = run_stages(self.config.model_copy(update={"output": str(directory)}), "allocate").workspace
        self.chain = read_chain(self.space)
        self.budgets = list(self.config.allocation.budgets)
        self.profiles: list[RankProfile] = [self.chain.at(budget) for budget in self.budgets]

    @property
    def base(self) -> nn.Module:
        """The original model."""
        return self.space.base

    def decomposed(self) -> nn.Module:
        """A fresh elastic model, not trained."""
        return self.space.elastic("elastic_initial")[0]

    def nats(self, model: nn.Module) -> float:
        """Held-out nats per token."""
        return self.space.judge(model)["nats_per_token"]

    def nats_by_budget(self, model: nn.Module) -> list[float]:
        """Held-out nats per token at each budget's profile."""
        found = []
        for profile in self.profiles:
            with use_profile(model, profile):
                found.append(self.nats(model))
        return found

    def trained(self, profiles: Sequence[Mapping[str, int]], *, steps: int, seed: int, checkpoint: Path) -> nn.Module:
        """A fresh elastic model, distilled at these profiles; an interrupted training goes on from `checkpoint`/."""
        model = self.decomposed()
        self.train_(model, profiles, steps=steps, seed=seed, checkpoint=checkpoint, objective=self.space.objective())
        return model

    def train_(
        self, model: nn.Module, profiles: Sequence[Mapping[str, int]], *, steps: int, checkpoint: Path, **options: Any
    ) -> None:
        """Distils a model in place as the configuration says; `options` are `distill_`'s."""
        settings = self.config.distillation
        distill_(
            model,
            self.base,
            self.space.samples.training,
            list(profiles),
            steps=steps,
            learning_rate=settings.learning_rate,
            # the same share of the steps as in a run of the configured length
            warmup_steps=round(steps * settings.warmup_steps / max(1, settings.steps)),
            weight_decay=settings.weight_decay,
            accumulation=settings.accumulation,
            max_norm=settings.max_norm,
            autocast=self.autocast,
            weights=self._weights(profiles),
            checkpoint=checkpoint,
            checkpoint_every=settings.checkpoint_every,
            **options,
        )
        shutil.rmtree(checkpoint)

    def _weights(self, profiles: Sequence[Mapping[str, int]]) -> Sequence[float] | None:
        """The configured weights where all profiles are trained; they are told from the largest, as budgets are."""
        weights = self.config.distillation.weights
        return None if weights is None or len(profiles) < len(self.profiles) else weights[::-1]

    def key(self, **more: Any) -> dict[str, Any]:
        """What tells a training's units from those of other settings, models and data."""
        return told_apart(self.config, TRAINED) | more

    def consolidated(self, seed: int, work: Path) -> list[float]:
        """Nats per token by budget of the elastic model, trained for all; studies of these settings share it."""
        ledger = Ledger(work / "consolidated", self.key())
        path = ledger.directory / f"training-{seed}"

        def compute() -> list[float]:
            steps = self.config.distillation.steps
            return self.nats_by_budget(self.trained(self.profiles[::-1], steps=steps, seed=seed, checkpoint=path))

        with RunDirectory(ledger.directory).locked():
            return ledger.take(f"seed {seed}", compute)

    @property
    def autocast(self) -> torch.dtype | None:
        """What training computes in."""
        return autocast_dtype(self.config.distillation.autocast, self.space.device)

    def facts(self) -> dict[str, Any]:
        """What a result shows of its settings."""
        config = self.config
        return {
            "model": config.name, "data": Path(config.data.path or config.data.source).name,
            "tokens_a_sample": config.data.max_tokens, "calibration": config.data.calibration,
            "evaluation": config.data.evaluation, "budgets": self.budgets, "steps": config.distillation.steps,
            "samples_a_step": config.distillation.batch_size * config.distillation.accumulation,
            "learning_rate": config.distillation.learning_rate, "autocast": str(self.autocast),
            "device": str(self.space.device),
        }  # fmt: skip
