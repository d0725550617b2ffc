"""What is trained of an elastic model: the parameters that its sizes share, and those of each size's own."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from flexrank.data.batches import eval_mode
from flexrank.errors import FlexrankError
from flexrank.nn.blocks import block_stack, replaced_forwards
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.switch import layer_shapes, nested_layers, require_fitting, restored_sizes, set_profile, use_profile
from flexrank.profiles.costs import full_ranks, profile_parameters


def layers_with_matrix(profiles: Sequence[Mapping[str, int]], full: Mapping[str, int]) -> set[str]:
    """The layers that have their full-rank matrix beside their factors, given all full ranks.

    Some size leaves them full, and another has a lower rank there or one of several sizes is the full model.
    """
    keeps_base = len(profiles) > 1 and full in profiles
    ranks = {name: {profile[name] for profile in profiles} for name in full}
    return {name for name, own in ranks.items() if full[name] in own and (keeps_base or min(own) < full[name])}


def set_sizes_(model: nn.Module, profiles: Sequence[Mapping[str, int]]) -> list[int]:
    """Gives each elastic layer the parameters that these sizes do not share; the outputs of all sizes stay the same.

    These are vectors for each size and the full-rank matrices of `layers_with_matrix`. Equal profiles are one size.
    Returns each profile's index among sizes, smallest first.
    """
    layers, shapes, given = nested_layers(model), layer_shapes(model), profiles
    profiles = sorted(profiles, key=lambda profile: profile_parameters(profile, shapes))
    with_matrix = layers_with_matrix(profiles, full_ranks(shapes))
    rows: dict[str, list[Any]] = {name: [] for name in layers}
    profiles = [profile for number, profile in enumerate(profiles) if profile not in profiles[:number]]
    for profile in profiles:
        with use_profile(model, profile):
            for name, layer in layers.items():
                rows[name].append(layer.active_vectors)
    for name, layer in layers.items():
        if layer.dense is None and name in with_matrix:
            layer.set_dense_()
        layer.set_sizes_([profile[name] for profile in profiles], rows[name])
    set_profile(model, {name: layer.rank for name, layer in layers.items()})
    return [profiles.index(profile) for profile in given]


@contextlib.contextmanager
def sized(model: nn.Module, profiles: Sequence[Mapping[str, int]], is_balanced: bool) -> Iterator[list[int]]:
    """`trimmed_factors` for the block; yields the indices of `set_sizes_`, or none unless training is `balanced`."""
    size_indices = set_sizes_(model, profiles) if is_balanced else []
    with trimmed_factors(model, profiles):
        yield size_indices


@contextlib.contextmanager
def undone_if_untrained(model: nn.Module, losses: Sequence[float]) -> Iterator[None]:
    """If the block fails while there are no losses, each elastic layer gets back what `set_sizes_` has replaced."""
    before = [(layer, layer.dense, layer.sizes, layer.card_sizes) for layer in nested_layers(model).values()]
    try:
        yield
    except BaseException:
        for layer, dense, sizes, card_sizes in before if not losses else ():
            layer.dense, layer.sizes, layer.card_sizes = dense, sizes, card_sizes
        raise


@contextlib.contextmanager
def trimmed_factors(model: nn.Module, profiles: Sequence[Mapping[str, int]]) -> Iterator[None]:
    """Inside the block each elastic layer holds only its first components, up to the last that `profiles` need.

    They are separate parameters in the memory of the full ones: training them changes the first components of `u` and
    `v`, and the components above need no gradient or optimiser state. Raises FlexrankError as `set_profile` does.
    """
    layers = nested_layers(model)
    for profile in profiles:
        require_fitting(layers, profile)
    whole = [(layer, layer.u, layer.v) for layer in layers.values()]
    with restored_sizes(layers.values()):
        for name, layer in layers.items():
            ranks = {profile[name] for profile in profiles}
            used = max((rank for rank in ranks if not layer.is_dense_at(rank)), default=len(layer.u))
            if used < len(layer.u):
                if layer.rank > used and not layer.is_dense_at(layer.rank):  # otherwise its size stays, to be measured
                    layer.rank = used
                layer.u, layer.v = (nn.Parameter(f.detach()[:used], f.requires_grad) for f in (layer.u, layer.v))
        try:
            yield
        finally:
            for layer, u, v in whole:
                _copy_back_(u, layer.u)
                _copy_back_(v, layer.v)
                layer.u, layer.v = u, v


def _copy_back_(whole: nn.Parameter, own: nn.Parameter) -> None:
    """Copies the first components back into a factor, moved to their device, if `Module.to` gave them other memory.

    accelerate moves a model of several processes on CPUs from `cpu` to `cpu:0`.
    """
    if own.data_ptr() != whole.data_ptr():
        whole.data = whole.data.to(own.device)
        whole.data[: len(own)].copy_(own.data)


def trainable_parameters(
    model: nn.Module, train_embeddings: bool = False, factors_only: bool = False
) -> dict[str, nn.Parameter]:
    """The parameters that consolidation trains, by name; `train_embeddings` as in `distill_`.

    With `factors_only`, only factors, size vectors and, if they are trained, embeddings. Raises FlexrankError if there
    are none, or if any is float16, which AdamW's small steps would not change.
    """
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    kept = {parameter for module in embeddings for parameter in module.parameters()}
    layers = [module for module in model.modules() if isinstance(module, NestedLayer)]
    chosen = {p for layer in layers for p in (layer.u, layer.v, *(layer.sizes.parameters() if layer.sizes else ()))}
    trainable = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.requires_grad
        and (train_embeddings if parameter in kept else not factors_only or parameter in chosen)
    }  # fmt: skip
    if not trainable:
        raise FlexrankError("every parameter has requires_grad=False; consolidation has nothing to train")
    for name, parameter in trainable.items():
        if parameter.dtype is torch.float16:
            raise FlexrankError(f"parameter {name!r} is float16; consolidate weights in float32 or bfloat16")
    return trainable


@contextlib.contextmanager
def training(
    model: nn.Module, teacher: nn.Module, trainable: Mapping[str, nn.Parameter], gradient_checkpointing: bool = False
) -> Iterator[None]:
    """Inside the block only `trainable` gets gradients, and both models are in eval mode.

    With `gradient_checkpointing` each block of the model's stack stores its inputs, and reruns in the backward pass.
    """
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    chosen = set(trainable.values())
    for parameter in required:
        parameter.requires_grad_(parameter in chosen)
    repeating = _repeating_blocks(model) if gradient_checkpointing else contextlib.nullcontext()
    try:
        with eval_mode(model, teacher), repeating, torch.enable_grad():
            yield
    finally:
        for parameter, flag in required.items():
            parameter.requires_grad_(flag)
            parameter.grad = None


@contextlib.contextmanager
def _repeating_blocks(model: nn.Module) -> Iterator[None]:
    """Inside the context the stack's blocks store only their inputs for the backward pass."""
    stack = block_stack(model, nested_layers(model))
    if not stack:
        what = f"{type(model).__name__} has no stack of them, so leave it out"
        raise FlexrankError(f"gradient checkpointing goes block by block; {what}")
    # A part of a model may have a configuration of its own, such as T5's decoder.
    configs: dict[int, Any] = {id(one): one for one in (getattr(module, "config", None) for module in model.modules())}
    cached = {key: one.use_cache for key, one in configs.items() if getattr(one, "use_cache", None) is not None}
    for key in cached:  # a block that runs again would append its keys and values twice
        configs[key].use_cache = False
    try:
        with replaced_forwards({block: functools.partial(_checkpointed, block.forward) for _, block in stack}):
            yield
    finally:
        for key, value in cached.items():
            configs[key].use_cache = value


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:  # on copies: a block that changes its input in place would do so twice
        return forward(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, **kwargs)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_floating_point() else value
