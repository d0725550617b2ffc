"""One elastic artefact for every size, read completely or only up to a budget.

`elastic.safetensors`, split into several files if it is large, stores factors by component, so a layer's r leading
components are the first bytes of its tensors. A reader with a budget reads no others, and a layer's dense matrix only
if the layer has full rank at that budget.
`elastic.json` holds the layers' specs, the chain, the tensors' dtypes, and a checksum for each segment between two
ranks of the chain, so a prefix is verified without the rest.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexrank import files, processes
from flexrank.artefacts.cards import read_sizes, write_elastic_card
from flexrank.artefacts.deployed import Factory, bare_model, describe, factory_name, fill
from flexrank.artefacts.tensors import ShardWriter, named_tensors, open_tensors, shared_places
from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.hf.companions import local_directory, save_companions, save_tokenizer, verify_artefact
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.experts import separate_as_recorded_
from flexrank.nn.quantised import require_unquantised
from flexrank.nn.select import require_in_memory, require_merged, unwrapped
from flexrank.nn.sharding import is_sharded
from flexrank.nn.specs import layer_spec, require_dtype
from flexrank.nn.switch import footprint, nested_layers, require_fitting, set_profile
from flexrank.profiles.chain import ChainEntry, ProfileChain, require_chain

ELASTIC_STATE = "elastic"
ELASTIC_DOCUMENT = "elastic.json"
#: A directory with one of these is an artefact, which another may replace.
MARKERS = ELASTIC_DOCUMENT, f"{ELASTIC_STATE}.safetensors"
#: The approximate size in bytes of one file of tensors, and so the most that a writer holds in memory.
SHARD_BYTES = 2**28
ELASTIC_KIND = "elastic"
#: The last format in which sizes with equal rank in a layer shared the layer's vectors.
LAST_RANK_KEYED_FORMAT = 2
ELASTIC_KEYS = ("library", "class", "layers", "chain", "aliases", "factory", "parameters", "tensors", "files")


def save_elastic(
    model: nn.Module,
    chain: ProfileChain,
    directory: str | Path,
    *,
    factory: Factory | None = None,
    tokenizer: Any = None,
    deployed_dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes an elastic model and its chain as one artefact with a model card, completely or not at all.

    All components are written, whatever the active ranks, except that a consolidated model ends at its largest trained
    size, above which the base model is better, and has no profiles between the requested ones whose components are not
    there. An artefact in `directory` is replaced; a directory with only other files is refused. `factory` builds the
    bare architecture of a model whose class is not transformers'. Sizes that `flexrank deploy` cuts from the artefact
    have `deployed_dtype`, by default the elastic weights' own. For a sharded model all processes call this; process 0
    writes it tensor by tensor, and never holds more than one file's tensors.

    Raises:
        FlexrankError: the model has no elastic layers, the chain names other layers, none of its sizes is trained, or
            its class is one of your own that was derived from transformers', and there is no factory.
    """
    require_dtype(deployed_dtype)
    require_chain(chain)
    model = unwrapped(model)
    for require in (require_in_memory, require_merged, require_unquantised):
        require(model)
    if is_sharded(model) and not processes.is_first():
        layers = nested_layers(model)
        written = _written_ranks(layers, _trained_part(chain, layers))
        for _ in _gathered_state(model, written, named_tensors(model.state_dict())[1].keys()):
            pass  # process 0 gathers the tensors from all processes' parts
        return
    with files.directory_aside(directory, *MARKERS) as aside:
        ElasticWriter(model, aside, tokenizer, shard_bytes=shard_bytes).finish(chain, factory, deployed_dtype)


class ElasticWriter:
    """Writes an elastic model into an empty directory, layer by layer if need be, holding one file's tensors at most.

    Create it while the model is complete: `put` frees a layer's values once they are written, and the model stays
    without them. Floating-point tensors are written in `dtype`, by default their own.
    """

    def __init__(
        self, model: nn.Module, directory: Path, tokenizer: Any = None, dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
    ):  # fmt: skip
        self._model, self._directory, self._dtype = model, directory, dtype
        self._library = models.library_of(model)
        if self._library == "transformers":
            models.save_config(model, directory, dtype)
            save_companions(model, directory, tokenizer)
        else:
            save_tokenizer(tokenizer, directory)
        self._files = files.digest_files(directory)  # without the tensors, which have their own digests
        self._shards = ShardWriter(directory, ELASTIC_STATE, shard_bytes)
        self._aliases = named_tensors(model.state_dict())[1]
        self._places = shared_places(model)
        self._digests: dict[str, Any] = {}
        self._dtypes: dict[str, str] = {}

    def put(self, name: str) -> None:
        """Writes all components of an elastic layer, and frees its values."""
        layer = self._model.get_submodule(name)
        assert isinstance(layer, NestedLayer)
        for key, tensor in layer.state_dict().items():
            self._add(f"{name}.{key}", tensor, [len(layer.u)] if key in ("u", "v") else None)
        others = [other for other in self._places.get(name, ()) if other != name]
        self._aliases |= {f"{other}.{key}": f"{name}.{key}" for other in others for key in layer.state_dict()}
        layer.to("meta")

    def finish(
        self, chain: ProfileChain, factory: Factory | None = None, deployed_dtype: torch.dtype | None = None
    ) -> None:
        """Writes the remaining tensors, the document and the card; arguments and errors are those of `save_elastic`."""
        model, layers = self._model, nested_layers(self._model)
        if models.is_transformers_model(model) and self._library == "torch" and factory is None:
            right = "give factory=, 'package.module:function', which builds it"
            raise FlexrankError(f"{type(model).__name__} is no class of transformers, which cannot build it; {right}")
        maker = None if factory is None else factory_name(factory)
        # The bytes of what is written: the model may have another dtype than when it was probed.
        chain = dataclasses.replace(_trained_part(chain, layers), footprint=footprint(model, self._dtype))
        for entry in chain.entries:
            require_fitting(layers, entry.profile)
        written = _written_ranks(layers, chain)
        self._aliases = {alias: self._aliases[alias] for alias in model.state_dict().keys() & self._aliases.keys()}
        self._add_rest(chain, written)
        specs = {name: layer_spec(layer) | {"rank": written[name]} for name, layer in layers.items()}
        content = describe(model, self._library, specs, self._aliases, maker)
        content["parameters"] = _written_parameters(model, written)
        content |= {"chain": chain.to_json(), "tensors": self._digests, "dtypes": self._dtypes}
        content |= {"shards": self._shards.finish(), "files": self._files}
        content["deployed_dtype"] = None if deployed_dtype is None else files.dtype_name(deployed_dtype)
        files.write_document(self._directory / ELASTIC_DOCUMENT, ELASTIC_KIND, content)
        sizes = chain if deployed_dtype is None else chain.counted_in(deployed_dtype.itemsize)
        write_elastic_card(self._directory, content, sizes, model)

    def _add_rest(self, chain: ProfileChain, written: Mapping[str, int]) -> None:
        factors = {f"{name}.{factor}": name for name in written for factor in "uv"}
        for key, tensor in _gathered_state(self._model, written, self._digests.keys() | self._aliases.keys()):
            name = factors.get(key)
            ranks = () if name is None else {min(entry.profile[name], written[name]) for entry in chain.entries}
            self._add(key, tensor, None if name is None else sorted({*ranks, written[name]}))

    def _add(self, key: str, tensor: Tensor, ends: list[int] | None = None) -> None:
        """Writes a tensor; a factor gets a digest for each segment, which end at the ranks `ends`."""
        tensor = tensor.to("cpu", self._dtype if tensor.is_floating_point() else None)
        self._digests[key] = files.digest_tensor(tensor) if ends is None else _segment_digests(tensor, ends)
        self._dtypes[key] = str(tensor.dtype)
        self._shards.add(key, tensor)


def load_elastic(
    directory: str | Path,
    budget: float | None = None,
    *,
    model: nn.Module | None = None,
    max_params: int | None = None,
    max_bytes: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, ProfileChain]:
    """Reads an elastic artefact, in eval mode and at the largest rank read; `set_budget` switches it between sizes.

    Args:
        directory: what `save_elastic` wrote, or a repository `owner/name` on the hub that holds it.
        budget: read only the components of the largest profile within this budget; the chain ends there.
        model: the bare architecture, filled in place; needed if the artefact is not a transformers model and names no
            factory, or if you do not trust its factory.
        max_params: like `budget`, but limits the whole model's parameters; `max_bytes` limits its bytes.
        dtype: the dtype of deployment, by which `max_bytes` counts every weight; by default the artefact's own.

    Raises:
        FlexrankError: a file is missing, truncated or edited, the budget is too small, or the architecture differs.
    """
    require_dtype(dtype)
    directory, count = local_directory(directory), None
    if not (budget is None and max_params is None and max_bytes is None):
        chain = read_shapes(directory)[1]
        chain = chain if dtype is None else chain.counted_in(dtype.itemsize)
        entry = chain.entry_at(budget, max_params=max_params, max_bytes=max_bytes)
        count = chain.entries.index(entry) + 1
    return load_entries(directory, count, model)


@torch.inference_mode(False)  # whose tensors could not be trained
def load_entries(
    directory: Path, count: int | None = None, model: nn.Module | None = None
) -> tuple[nn.Module, ProfileChain]:
    """As `load_elastic`, but reads only the components of the chain's first `count` entries; None reads all."""
    document = read_elastic_document(directory)
    chain, ranks = ProfileChain.from_json(document["chain"]), None
    if count is not None:
        chain = chain.up_to(chain.entries[count - 1])
        ranks = chain.entries[-1].profile
    elastic, sizes = _load(directory, document, ranks, model), read_sizes(directory)
    for layer in nested_layers(elastic).values():
        layer.chain, layer.card_sizes = chain, sizes
    return elastic, chain


def load_components(directory: str | Path, ranks: Mapping[str, int]) -> nn.Module:
    """Reads each layer's first components, up to its rank in `ranks`. Raises as `load_elastic` does without `model`."""
    return _load(Path(directory), read_elastic_document(Path(directory)), ranks, None)


def _load(
    directory: Path, document: Mapping[str, Any], ranks: Mapping[str, int] | None, model: nn.Module | None
) -> nn.Module:
    verify_artefact(directory, document["files"])
    specs = document["layers"]
    if ranks is not None:
        specs = {
            name: {**spec, "rank": min(ranks[name], spec["rank"]), "dense": ranks[name] > spec["rank"]}
            for name, spec in specs.items()
        }
    if model is None:
        is_transformers = document["library"] == "transformers"
        model = models.skeleton(directory) if is_transformers else bare_model(document["factory"], directory)
        if is_transformers:
            separate_as_recorded_(model)
    tensors = _read_prefixes(directory, document, specs)
    elastic = fill(model, specs, tensors, document["aliases"], directory)
    layers = nested_layers(elastic)
    if document["format"] <= LAST_RANK_KEYED_FORMAT:
        _set_sizes_by_rank_(layers, ProfileChain.from_json(document["chain"]))
    set_profile(elastic, {name: layer.rank for name, layer in layers.items()})
    models.mark_elastic(elastic)
    return elastic


@torch.no_grad()
def _set_sizes_by_rank_(layers: Mapping[str, NestedLayer], chain: ProfileChain) -> None:
    """Gives each requested size its own vectors, interpolated by its rank from those that earlier formats store."""
    for name, layer in layers.items():
        if layer.sizes is not None:
            ranks, rows = [entry.profile[name] for entry in chain.requested], []
            for position in np.interp(ranks, layer.sizes.ranks, range(len(layer.sizes.ranks))):
                layer.sizes.position = float(position)
                rows.append(layer.active_vectors)
            layer.set_sizes_(ranks, rows)


def read_shapes(directory: str | Path) -> tuple[dict[str, tuple[int, int]], ProfileChain]:
    """The shapes (m, n) of an elastic artefact's layers, and its chain; reads no tensors. Raises as `load_elastic`."""
    document = read_elastic_document(Path(directory))
    shapes = {name: (int(spec["shape"][0]), int(spec["shape"][1])) for name, spec in document["layers"].items()}
    return shapes, ProfileChain.from_json(document["chain"])


def read_elastic_document(directory: Path) -> dict[str, Any]:
    """Reads the document that describes an elastic artefact; raises FlexrankError if it is missing or damaged."""
    path = directory / ELASTIC_DOCUMENT
    if not path.is_file():
        right = "give what fr.save_elastic wrote, or RUN/elastic"
        raise FlexrankError(f"{directory}: holds no elastic model ({ELASTIC_DOCUMENT} is missing); {right}")
    document = files.read_document(path, ELASTIC_KIND, ELASTIC_KEYS)
    # Earlier versions wrote a single file, and did not record its name.
    document.setdefault("shards", {MARKERS[1]: list(document["tensors"])})
    return document


def _trained_part(chain: ProfileChain, layers: Mapping[str, NestedLayer]) -> ProfileChain:
    """The chain up to the largest ranks that have vectors of their own; the whole chain if no layer has vectors.

    Entries that no budget asks for are left out if the layers, of which only what was trained may be there, lack ranks.
    """
    last = {name: layer.sizes.ranks[-1] for name, layer in layers.items() if layer.sizes}

    def is_kept(entry: ChainEntry) -> bool:
        ranks = {name: rank for name, rank in entry.profile.items() if name in layers}
        is_there = entry.requested is not None or all(layers[name].has_rank(rank) for name, rank in ranks.items())
        return is_there and all(ranks.get(name, 0) <= rank for name, rank in last.items())

    return dataclasses.replace(chain, entries=tuple(filter(is_kept, chain.entries)))


def _written_ranks(layers: Mapping[str, NestedLayer], chain: ProfileChain) -> dict[str, int]:
    """How many components of each layer are written: all, or after consolidation up to the largest factored rank."""
    written = {}
    for name, layer in layers.items():
        ranks = (entry.profile[name] for entry in chain.entries)
        below = max((rank for rank in ranks if not layer.is_dense_at(rank)), default=1)
        written[name] = len(layer.u) if layer.sizes is None else below
    return written


def _gathered_state(
    model: nn.Module, written: Mapping[str, int], left_out: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields what is written, factors cut to their ranks; for a sharded model, all processes iterate to gather it."""
    layers = nested_layers(model)
    for key, tensor in model.state_dict().items():
        name, _, leaf = key.rpartition(".")
        if key in left_out:
            continue
        if name in layers and leaf in layers[name].shard_dims():
            tensor = layers[name].whole(leaf, None if leaf == "dense" else written[name]).detach()
        yield key, tensor


def _written_parameters(model: nn.Module, written: Mapping[str, int]) -> int:
    layers = nested_layers(model)
    divided = {id(getattr(layer, name)) for layer in layers.values() for name in layer.shard_dims()}
    others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in divided)
    factors = sum(written[name] * sum(layer.matrix_shape) for name, layer in layers.items())
    return others + factors + sum(math.prod(one.matrix_shape) for one in layers.values() if one.dense is not None)


def _segment_digests(tensor: Tensor, ends: list[int]) -> list[list[Any]]:
    return [[end, files.digest_tensor(tensor[start:end])] for start, end in pairwise([0, *ends])]


def _read_prefixes(
    directory: Path, document: Mapping[str, Any], specs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, with factors up to their rank, each checked against its digests."""
    limits = {f"{name}.{factor}": spec["rank"] for name, spec in specs.items() for factor in "uv"}
    left = {f"{name}.dense" for name, spec in specs.items() if not spec.get("dense")}
    digests, dtypes = document["tensors"], document.get("dtypes", {})  # earlier versions wrote no dtypes
    for file, names in document["shards"].items():
        path = directory / file
        with open_tensors(path) as tensors:
            for name in set(names) - set(tensors.keys()):
                raise FlexrankError(f"{path}: tensor {name!r} is missing; copy the file again")
            for name in [one for one in names if one not in left]:
                tensor = _read_checked(path, tensors, name, digests[name], limits.get(name))
                if str(tensor.dtype) != dtypes.get(name, str(tensor.dtype)):  # the same bytes read as other numbers
                    raise FlexrankError(f"{path}: tensor {name!r} is not {dtypes[name]}; the file was edited")
                yield name, tensor


def _read_checked(path: Path, tensors: Any, name: str, digest: Any, limit: int | None) -> Tensor:
    """Reads a tensor, or the first `limit` components of a factor, which are checked up to the end of their segment."""
    end = None if limit is None else next(end for end, _ in digest if end >= limit)
    tensor: Tensor = tensors.get_tensor(name) if end is None else tensors.get_slice(name)[:end]
    if end is not None:
        digest = [segment for segment in digest if segment[0] <= end]
    if digest != (files.digest_tensor(tensor) if end is None else _segment_digests(tensor, [end for end, _ in digest])):
        raise FlexrankError(f"{path}: tensor {name!r} does not match its checksum; copy the file again")
    return tensor if limit == end else tensor[:limit].clone()
