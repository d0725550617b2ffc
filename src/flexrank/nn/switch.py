"""Switching an elastic model between sizes, and measuring what it holds besides its factors."""

import bisect
import contextlib
import copy
import itertools
import logging
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedLayer, SizeVectors
from flexrank.nn.select import unwrapped
from flexrank.nn.size_lock import size_lock_of
from flexrank.profiles import ChainEntry, Footprint, ProfileChain, RankProfile
from flexrank.profiles.chain import require_chain
from flexrank.profiles.costs import Shape, largest_rank, profile_parameters

log = logging.getLogger("flexrank")


def nested_layers(model: nn.Module) -> dict[str, NestedLayer]:
    """The elastic layers by name, also of a compiled model. Raises FlexrankError if the model has none."""
    layers = {name: module for name, module in unwrapped(model).named_modules() if isinstance(module, NestedLayer)}
    if not layers:
        ways = "decompose it first, or read an elastic artefact by load_elastic"
        raise FlexrankError(f"{type(model).__name__} has no elastic layers; {ways}")
    return layers


def full_profile(model: nn.Module) -> dict[str, int]:
    """The full rank of every elastic layer."""
    return {name: layer.max_rank for name, layer in nested_layers(model).items()}


def layer_shapes(model: nn.Module) -> dict[str, Shape]:
    """The shape (m, n) of every elastic layer's matrix."""
    return {name: layer.matrix_shape for name, layer in nested_layers(model).items()}


def uniform_profile(model: nn.Module, budget: float, slack_share: float = 0.0) -> RankProfile:
    """The profile of each layer's largest rank whose deployed parameters are at most `budget` times its dense ones."""
    ranks = {}
    for name, layer in nested_layers(model).items():
        shape = layer.matrix_shape
        rank = max(1, largest_rank(shape, budget * math.prod(shape), slack_share))
        ranks[name] = rank if layer.has_rank(rank) else len(layer.u)
    return RankProfile(ranks)


def set_profile(model: nn.Module, profile: Mapping[str, int]) -> None:
    """Sets the active ranks of all elastic layers. Raises FlexrankError if the profile does not fit."""
    layers = nested_layers(model)
    require_fitting(layers, profile)
    for name, rank in profile.items():
        layers[name].rank = rank
    owners = {name: layer.sizes for name, layer in layers.items() if layer.sizes is not None}
    if owners:
        position = _position(owners, profile, {name: layers[name].matrix_shape for name in owners})
        for sizes in owners.values():
            sizes.position = position


def _position(owners: Mapping[str, SizeVectors], profile: Mapping[str, int], shapes: Mapping[str, Shape]) -> float:
    """The index of the size that has this profile; otherwise interpolated between two sizes by parameter count."""
    own = tuple(profile[name] for name in owners)
    sizes = list(zip(*(vectors.ranks for vectors in owners.values()), strict=True))
    if own in sizes:
        return float(sizes.index(own))
    wanted, *known = (profile_parameters(dict(zip(owners, one, strict=True)), shapes) for one in (own, *sizes))
    above = bisect.bisect_left(known, wanted)
    if above in (0, len(known)) or known[above] == wanted:
        return float(min(above, len(known) - 1))
    return above - 1 + (wanted - known[above - 1]) / (known[above] - known[above - 1])


def set_budget(
    model: nn.Module,
    budget: float | None = None,
    *,
    max_params: int | None = None,
    max_bytes: int | None = None,
    chain: ProfileChain | None = None,
) -> ChainEntry:
    """Switches an elastic model to its chain's size for a budget; only ranks change, and no weight is copied.

    The size applies to the whole module tree, for every thread that runs it. Other threads may run it meanwhile: a
    forward pass under way ends at its size before the switch, unless it began before the first call of `set_budget`.
    Threads that need different sizes each take a `submodel`, and may switch that at any time.

    Args:
        budget: a share of the factorised layers' dense parameters; the largest size within all limits is taken.
        max_params: limit on the parameters of the whole model as deployed.
        max_bytes: limit on the bytes of the whole model's tensors as deployed.
        chain: by default the one that `load_elastic` read with the model.

    Returns:
        The size: its profile, its parameters and its predicted error.

    Raises:
        FlexrankError: no limit is given, no size of the chain is within the limits, or the model has no chain.
    """
    layers = nested_layers(model)
    chain = chain or next(iter(layers.values())).chain
    if chain is None:
        raise FlexrankError(f"{type(model).__name__} was not read by load_elastic and has no chain; give chain=…")
    require_chain(chain)
    entry = chain.entry_at(budget, max_params=max_params, max_bytes=max_bytes)
    with size_lock_of(unwrapped(model)).exclusive():
        set_profile(model, entry.profile)
    return entry


def require_fitting(layers: Mapping[str, NestedLayer], profile: Mapping[str, int]) -> None:
    """Raises FlexrankError unless the profile gives each elastic layer, and no other, a rank in its range."""
    if not isinstance(profile, Mapping):
        kind = type(profile).__name__
        raise FlexrankError(f"profile is a {kind}; it is a mapping of layers to ranks, such as chain.at(0.5)")
    for name in sorted(profile.keys() ^ layers.keys()):
        where = "profile" if name in layers else "model"
        raise FlexrankError(f"layer {name!r} is not in the {where}; profile and model must name the same layers")
    for name, rank in profile.items():
        if not isinstance(rank, numbers.Integral) or not layers[name].has_rank(int(rank)):
            raise FlexrankError(f"layer {name!r}: rank {rank} is out of range; it has {layers[name].ranks}")


def require_whole_factors(layers: Mapping[str, NestedLayer]) -> None:
    """Raises FlexrankError if a layer's full-rank matrix is not the product of its factors, as after consolidation."""
    for name, layer in layers.items():
        if layer.dense is not None or len(layer.u) < min(layer.matrix_shape):
            raise FlexrankError(
                f"layer {name!r}: its matrix at full rank is not the product of its factors; probe before consolidation"
            )


@contextlib.contextmanager
def use_profile(model: nn.Module, profile: Mapping[str, int]) -> Iterator[nn.Module]:
    """Sets the model to this profile inside the block (the paper's 𝒯_m), and restores its size afterwards."""
    with restored_sizes(nested_layers(model).values()):
        set_profile(model, profile)
        yield model


@contextlib.contextmanager
def restored_sizes(layers: Iterable[NestedLayer]) -> Iterator[None]:
    """Restores each layer's active rank and choice of size vectors after the block."""
    before = [(layer, layer.rank, None if layer.sizes is None else layer.sizes.position) for layer in layers]
    try:
        yield
    finally:
        for layer, rank, position in before:
            layer.rank = rank
            if layer.sizes is not None and position is not None:
                layer.sizes.position = position


def submodel(model: nn.Module, profile: Mapping[str, int]) -> nn.Module:
    """The elastic model at this profile, as separate modules on the same tensors.

    Several sizes of one model can thus run at once, each in its own thread, or a small one can draft for a larger one:
    `large.generate(…, assistant_model=small)`. Only modules are copied: switching one leaves the others unchanged.
    In-place changes of tensors show in all of them.
    Raises FlexrankError as `set_profile` does.
    """
    model = unwrapped(model)
    shared = itertools.chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, detached_tensors(model) | {id(one): one for one in shared})
    set_profile(twin, profile)
    return twin


def detached_tensors(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy`: weights that a forward has computed, which cannot be copied with their graph.

    Those of torch.nn.utils.prune and of its weight norm are such ones.
    """
    computed = (one for module in model.modules() for one in vars(module).values() if isinstance(one, Tensor))
    return {id(one): one.detach() for one in computed if not one.is_leaf}


@contextlib.contextmanager
@torch.no_grad()
def full_matrices(model: nn.Module, max_bytes: int) -> Iterator[None]:
    """Caches full-rank matrices inside the block, so a layer at full rank costs what its dense layer costs.

    They use the size vectors of the full model, whichever size is active. The weights must not change inside the block.
    The last layers come first; all take at most `max_bytes`, and on a GPU at most half of the free memory.
    """
    layers = nested_layers(model)
    max_bytes = max_bytes_on(next(iter(layers.values())).u.device, max_bytes)
    sizes = {name: layer.u.element_size() * math.prod(layer.matrix_shape) for name, layer in layers.items()}
    with use_profile(model, full_profile(model)):
        matrices = {name: layers[name].matrix for name in last_within(sizes, max_bytes)}
    for name, matrix in matrices.items():
        layers[name].full_matrix = matrix
    try:
        yield
    finally:
        for layer in layers.values():
            layer.full_matrix = None


def max_bytes_on(device: torch.device, max_bytes: int) -> int:
    """`max_bytes`, but on a GPU at most half of the free memory: the model's outputs need the rest."""
    if device.type != "cuda":
        return max_bytes
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    half = (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if half < max_bytes:
        log.info("full layers' matrices take up to %d bytes, half of what is free on %s", half, device)
    return min(max_bytes, half)


def last_within(sizes: Mapping[str, int], max_bytes: int) -> list[str]:
    """The names of the last items whose sizes sum to at most `max_bytes`, the last one first."""
    names = list(sizes)[::-1]
    sums = itertools.accumulate(sizes[name] for name in names)
    return [name for name, total in zip(names, sums, strict=True) if total <= max_bytes]


def share_tensors_(model: nn.Module, base: nn.Module) -> None:
    """Replaces an elastic model's parameters outside its elastic layers by the base's of the same name and dtype."""
    layers = nested_layers(model)
    theirs = dict(base.named_parameters(remove_duplicate=False))
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, own = name.rpartition(".")
        other = theirs.get(name)
        if owner not in layers and other is not None and other.dtype == parameter.dtype:
            model.get_submodule(owner)._parameters[own] = other


def stored_sizes(model: nn.Module) -> tuple[int, int]:
    """A model's number of parameters, and the bytes of its parameters and persistent buffers; tied ones count once."""
    tensors = {id(one): one for one in (*model.parameters(), *model.state_dict(keep_vars=True).values())}
    return sum(p.numel() for p in model.parameters()), sum(t.numel() * t.element_size() for t in tensors.values())


def footprint(model: nn.Module, dtype: torch.dtype | None = None) -> Footprint:
    """What an elastic model holds besides its factors, with floating-point tensors in `dtype` if that is given.

    Tied tensors and buffers count once; non-persistent buffers do not count.
    """

    def size(tensor: Tensor) -> int:
        return tensor.numel() * (dtype if dtype and tensor.is_floating_point() else tensor.dtype).itemsize

    layers = nested_layers(model).values()
    # On deployment a size's vectors merge into the factors, or a full-rank matrix takes the factors' place.
    factors = {id(parameter) for layer in layers for parameter in layer.parameters() if parameter is not layer.bias}
    others = [parameter for parameter in model.parameters() if id(parameter) not in factors]
    persistent = {id(value) for value in model.state_dict(keep_vars=True).values()}
    buffers = [buffer for buffer in model.buffers() if id(buffer) in persistent]
    width = dtype.itemsize if dtype else max(layer.u.element_size() for layer in layers)
    return Footprint(sum(parameter.numel() for parameter in others), sum(map(size, (*others, *buffers))), width)
