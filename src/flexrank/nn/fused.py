"""Deployed layers with the same input, each of its own rank, fused into one layer, as servers fuse q, k and v.

Under tensor parallelism a process holds some outputs of every layer, or some of the inputs that they share.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from flexrank.errors import FlexrankError
from flexrank.files import dtype_name


@dataclasses.dataclass(frozen=True)
class Shard:
    """A process's part of one gauge-aligned or dense layer, whose weights load under the layer's own names."""

    name: str  #: the layer's name, for errors
    shape: tuple[int, int]  #: (m, n) of the whole layer
    rank: int  #: 0 for a dense matrix
    aligned: int  #: number of leading outputs that are latents themselves
    rows: range  #: those of the m outputs that are held here
    columns: range  #: those of the n inputs that are held here

    @property
    def aligned_rows(self) -> range:
        """The latents that are outputs of this shard."""
        return range(self.rows.start, min(self.rows.stop, self.aligned))

    @property
    def expanded(self) -> range:
        """The rows of Û that this shard holds."""
        start, stop = (max(row - self.aligned, 0) for row in (self.rows.start, self.rows.stop))
        return range(start, stop)

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight of the whole layer, by its name in the files."""
        m, n = self.shape
        if not self.rank:
            return {"weight": self.shape}
        return {"weight": (0,), "latent.weight": (self.rank, n), "expand.weight": (m - self.aligned, self.rank)}

    @property
    def biases(self) -> dict[str, tuple[int, ...]]:
        """The same for the biases of a layer that has one."""
        head, m = {"bias": (self.aligned or self.shape[0],)}, self.shape[0]
        if not self.rank:
            return {**head}
        return {**(head if self.aligned else {}), "expand.bias": (m - self.aligned,)}


class FusedShards:
    """Adds the parameters of some shards to a layer, loads them, and multiplies by them.

    `latent.weight` stacks all shards' Ṽᵀ (Σ r, n), so one product gives every latent; `expand.weight` holds their
    flattened Û one after another (Σ k·r); `weight` stacks the dense matrices (Σ m, n). With t rows of input the layer
    costs t·Σ(r·n + k·r) multiply-adds, as much as the separate layers.
    """

    def __init__(self, shards: Sequence[Shard], names_loaded: set[str] | None = None):
        self.shards = tuple(shards)
        #: Of the layers of which some tensor was loaded; all layers of a model may share it.
        self._names_loaded = set[str]() if names_loaded is None else names_loaded
        self._latents = _slices(shard.rank for shard in shards)
        self._expanded = _slices(len(shard.expanded) * shard.rank for shard in shards)
        self._dense = _slices(0 if shard.rank else len(shard.rows) for shard in shards)
        self._outputs = _slices(len(shard.rows) for shard in shards)
        # Positions among all latents, which every forward pass needs.
        self._aligned = [
            slice(latents.start + shard.aligned_rows.start, latents.start + shard.aligned_rows.stop)
            for shard, latents in zip(shards, self._latents, strict=True)
        ]
        self._loaded: set[tuple[int, str]] = set()

    def add_to_(self, layer: Any, dtype: torch.dtype) -> dict[str, nn.Parameter]:
        """Adds uninitialised parameters on the default device, and returns them by name.

        `expand.bias` is empty: biases load into the layer's own `bias` (Σ m,).
        """
        inputs = len(self.shards[0].columns)
        layer.latent, layer.expand = nn.Module(), nn.Module()
        shapes: dict[str, tuple[int, ...]] = {
            "latent.weight": (self._latents[-1].stop, inputs), "expand.weight": (self._expanded[-1].stop,),
            "expand.bias": (0,), "weight": (self._dense[-1].stop, inputs),
        }  # fmt: skip
        for name, shape in shapes.items():
            module, _, last = name.rpartition(".")
            values = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            layer.get_submodule(module).register_parameter(last, values)
        return {name: layer.get_parameter(name) for name in shapes}

    @torch.no_grad()
    def load_(self, layer: Any, name: str, values: Tensor, index: int) -> None:
        """Copies a tensor of shard `index`, as stored in its layer's file, into the layer.

        Raises:
            FlexrankError: a shape that is not the layer's, a bias that the layer lacks, or a dtype that its slack was
                not chosen for.
        """
        shard = self.shards[index]
        self._require_fit(layer, shard, name, values)
        rows, columns, expanded = (slice(part.start, part.stop) for part in (shard.rows, shard.columns, shard.expanded))
        if name.endswith("bias"):
            self._load_bias_(layer, name, values[expanded if name == "expand.bias" else rows], index)
        elif name == "latent.weight":
            layer.get_parameter(name)[self._latents[index]] = values[:, columns]
        elif name == "expand.weight":
            layer.get_parameter(name)[self._expanded[index]] = values[expanded].flatten()
        elif not shard.rank:
            layer.get_parameter(name)[self._dense[index]] = values[rows, columns]
        self._loaded.add((index, name))
        self._names_loaded.add(shard.name)

    def require_complete(self, layer: Any) -> None:
        """Raises FlexrankError if a tensor was not loaded, and any of this layer or those that share its names was."""
        for index, shard in enumerate(self.shards):
            names = {**shard.stored, **(shard.biases if isinstance(layer.bias, Tensor) else {})}
            for name in names:
                if self._names_loaded and (index, name) not in self._loaded:
                    raise FlexrankError(f"{shard.name}.{name} is missing in the model's files; export it again")

    def multiply(self, layer: Any, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """The outputs of all shards, side by side, without bias."""
        latents, flat, dense = linear(x, layer.latent.weight), layer.expand.weight, layer.weight
        parts = []
        for index, shard in enumerate(self.shards):
            if not shard.rank:
                parts.append(linear(x, dense[self._dense[index]]))
                continue
            aligned, expanded = self._aligned[index], self._expanded[index]
            if aligned.start < aligned.stop:
                parts.append(latents[..., aligned])
            if expanded.start < expanded.stop:
                parts.append(linear(latents[..., self._latents[index]], flat[expanded].view(-1, shard.rank)))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _load_bias_(self, layer: Any, name: str, values: Tensor, index: int) -> None:
        first = self._outputs[index].start + (len(self.shards[index].aligned_rows) if name == "expand.bias" else 0)
        if not isinstance(layer.bias, Tensor):
            raise FlexrankError(f"{self.shards[index].name} has a bias in its files, and none in the server's model")
        layer.bias[first : first + len(values)] = values

    @staticmethod
    def _require_fit(layer: Any, shard: Shard, name: str, values: Tensor) -> None:
        expected = (shard.stored | shard.biases).get(name)
        if tuple(values.shape) != expected:
            raise FlexrankError(
                f"{shard.name}.{name} has the shape {tuple(values.shape)}; its config asks for {expected}"
            )
        dtype = layer.get_parameter("latent.weight").dtype
        if shard.aligned and values.dtype.itemsize > dtype.itemsize:
            raise FlexrankError(
                f"{shard.name} was deployed in {values.dtype}, and its slack does not suit {dtype}; serve it in "
                f"{values.dtype}, or deploy it with deployment.dtype: {dtype_name(dtype)}"
            )


def _slices(sizes: Iterable[int]) -> list[slice]:
    """Consecutive slices of these sizes."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.starmap(slice, itertools.pairwise(ends)))
