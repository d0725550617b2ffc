"""What several stages of a run share, loaded once."""

import contextlib
import dataclasses
import functools
import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flexrank import processes
from flexrank.artefacts.elastic import SHARD_BYTES, load_components, load_elastic, read_shapes
from flexrank.data.batches import call_model, some_rows, to_device
from flexrank.distill.objectives import FisherObjective, Objective, objective_for
from flexrank.distill.trained import layers_with_matrix
from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.hf.companions import MeanPooled
from flexrank.hf.meta import file_dtype
from flexrank.nn.experts import separate_experts
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.sharding import shard_, shard_blocks_
from flexrank.nn.switch import nested_layers, share_tensors_
from flexrank.profiles import ProfileChain
from flexrank.profiles.costs import full_ranks
from flexrank.run.config import RunConfig
from flexrank.run.directory import RunDirectory
from flexrank.run.samples import QualityFunction, Samples, load_samples, loss_rows
from flexrank.run.targets import probe_top_k, top_k_bytes

log = logging.getLogger("flexrank")


@dataclasses.dataclass
class Workspace:
    """A run in progress: its configuration, its directory, and what several stages load."""

    config: RunConfig
    directory: RunDirectory

    @functools.cached_property
    def device(self) -> torch.device:
        """The device on which the models run."""
        if self.config.device == "cuda" and not torch.cuda.is_available():
            raise FlexrankError("device is 'cuda'; torch finds no GPU here, so write cpu or auto")
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(auto if self.config.device == "auto" else self.config.device)

    def load_base(self) -> Any:
        """A new copy of the base model that may be changed: on the CPU, memory-mapped, in its files' dtype."""
        return models.load_model(self.config.model, self.config.task, dtype=None, only_dense=True)

    @functools.cached_property
    def base(self) -> Any:
        """The base model in eval mode: the teacher. It keeps its files' dtype; an image model has the run's `dtype`."""
        return self._as_teacher(self.load_base()).to(self.device)

    def _as_teacher(self, model: Any) -> Any:
        return model.to(getattr(torch, self.config.dtype)) if self.config.task == "classification" else model

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None for images."""
        return None if self.config.task == "classification" else models.load_tokenizer(self.config.model)

    @property
    def saved_tokenizer(self) -> Any:
        """What is saved beside each of the run's models: the tokenizer and, for embedding, how texts are pooled."""
        data = self.config.data
        return MeanPooled(self.tokenizer, data.max_tokens) if self.config.task == "embedding" else self.tokenizer

    @functools.cached_property
    def samples(self) -> Samples:
        """The run's data."""
        return load_samples(self.config, self.tokenizer)

    @functools.cached_property
    def measure_quality(self) -> QualityFunction:
        """The function that measures a model's qualities against the base model."""
        return self.samples.quality_function(self.base)

    def free_base(self) -> None:
        """Frees the base model's memory on a GPU that a fresh process is to use; the next access reads it again.

        On a CPU nothing is freed, as both processes map the same files.
        """
        if self.device.type != "cpu":
            self._forget_base()

    def _forget_base(self) -> None:
        for name in ("base", "deployed_base", "measure_quality"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def objective(self, hidden_weight: float = 0.0, top_k: int | None = None) -> FisherObjective:
        """The task's distillation loss."""
        temperature = self.config.distillation.temperature
        return objective_for(self.config.task, temperature=temperature, hidden_weight=hidden_weight, top_k=top_k)

    @functools.cached_property
    def probe_objective(self) -> Objective:
        """The task's distillation loss, with targets for the probe's samples that stay within `probe.target_bytes`."""
        objective, batches = self.objective(), self.samples.probe
        rows = loss_rows(self.config.task, batches)
        top_k = probe_top_k(self.config, rows, self._target_row_bytes(objective, batches[0]))
        if top_k is None:
            return objective
        taken, limit = top_k_bytes(rows, top_k), self.config.probe.target_bytes
        log.info(
            "probe: the teacher's outputs for %d rows are kept as its %d likeliest classes and one of all others, in "
            "%d bytes; probe.target_bytes is %d", rows, top_k, taken, limit,
        )  # fmt: skip
        return self.objective(top_k=top_k)

    @torch.no_grad()  # not inference_mode, whose tensors a sharded base could not use again in training
    def _target_row_bytes(self, objective: Objective, batch: Any) -> int:
        """Bytes of one row of the teacher's targets, from the first sample of a batch."""
        sample = to_device(some_rows(batch, slice(1)), self.device)
        target = objective.target(call_model(self.base, sample), sample)
        return target.shape[-1] * target.element_size()

    def elastic(self, name: str) -> tuple[nn.Module, ProfileChain]:
        """The elastic model in RUN/`name`, and its chain."""
        model, chain = load_elastic(self.directory / name)
        return model.to(self.device), chain

    def decomposed(self, ranks: Mapping[str, int]) -> nn.Module:
        """The decomposed model with only the components up to these ranks, in the dtype of deployed models."""
        model = load_components(self.directory / "elastic_initial", ranks)
        for tensor in model.state_dict(keep_vars=True).values():  # other buffers keep their dtype, as in `deploy`
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(self.deployed_dtype)
        return model.to(self.device)

    @contextlib.contextmanager
    def student(self, profiles: Sequence[Mapping[str, int]]) -> Iterator[nn.Module]:
        """Yields the model that consolidation trains at these profiles, on the device.

        With `distillation.sharded` each of several processes holds its part of it and, inside the block, of the base
        model: the processes map the files of both, and move only their parts to their devices.
        """
        if not self.config.distillation.sharded or processes.count() == 1:
            yield self._student(profiles).to(self.device)
            return
        self._forget_base()
        self.__dict__["base"] = base = self._as_teacher(self.load_base())
        model = self._student(profiles)
        shard_(model, self.device)
        shard_blocks_(base, nested_layers(model), self.device)
        try:
            yield model
        finally:
            self._forget_base()

    def _student(self, profiles: Sequence[Mapping[str, int]]) -> nn.Module:
        settings = self.config.distillation
        if settings.method == "paper" or not settings.steps or len(profiles) == 1:
            return load_elastic(self.directory / "elastic_initial")[0]
        return self.trained_part(profiles)

    def trained_part(self, profiles: Sequence[Mapping[str, int]]) -> nn.Module:
        """The part of the decomposed model that consolidation trains at several profiles; the rest is the base model's.

        Each layer has its components up to its largest rank below full, or all if every size leaves it full, on the
        CPU; and the layers of `layers_with_matrix` their full-rank matrix.
        """
        full = full_ranks(read_shapes(self.directory / "elastic_initial")[0])
        ranks = {name: {profile[name] for profile in profiles} for name in full}
        below = {name: max(some - {full[name]}, default=full[name]) for name, some in ranks.items()}
        model = load_components(self.directory / "elastic_initial", below)
        layers = nested_layers(model)
        with separate_experts(self.base):
            for name in layers_with_matrix(profiles, full):
                matrix = weight_matrix(self.base.get_submodule(name)).detach()
                layers[name].dense = nn.Parameter(matrix.contiguous(), requires_grad=False)
        share_tensors_(model, self.base)
        return model

    @property
    def shard_bytes(self) -> int:
        """Bytes of one file of an elastic artefact, which is in memory until it is written."""
        return min(SHARD_BYTES, self.config.decomposition.buffer_bytes // 4)

    @functools.cached_property
    def narrow_dtype(self) -> torch.dtype:
        """The narrower dtype of the elastic weights and the base model's files."""
        return self.config.narrow_dtype(file_dtype(self.config.model))

    @functools.cached_property
    def deployed_dtype(self) -> torch.dtype:
        """The dtype of deployed models."""
        return self.config.deployed_dtype(file_dtype(self.config.model))

    @functools.cached_property
    def deployed_base(self) -> Any:
        """The base model in the dtype of deployed models."""
        model = self.load_base()  # not a copy of `base`: both would be in memory
        dtype = getattr(torch, self.config.dtype) if self.config.task == "classification" else model.dtype
        return self.base if dtype is self.deployed_dtype else model.to(self.device, self.deployed_dtype)
