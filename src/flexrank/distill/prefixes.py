"""Training of only the components that some profile uses."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from flexrank.nn.elastic import NestedLayer
from flexrank.nn.switch import nested_layers, require_fitting


@contextlib.contextmanager
def used_components(model: nn.Module, profiles: Sequence[Mapping[str, int]]) -> Iterator[None]:
    """Inside the block each elastic layer holds only its first components, up to its largest rank in `profiles`.

    They are parameters of their own in the memory of the whole ones: training them changes the first components of `u`
    and `v`, and the components above need no gradient and no state of an optimiser.

    Raises:
        FlexrankError: a profile names other layers than the model has, or a rank is out of range.
    """
    layers = nested_layers(model)
    for profile in profiles:
        require_fitting(layers, profile)
    whole: list[tuple[NestedLayer, nn.Parameter, nn.Parameter, int]] = []
    for name, layer in layers.items():
        used = max(profile[name] for profile in profiles)
        if used < layer.max_rank:
            whole.append((layer, layer.u, layer.v, layer.rank))
            layer.rank = min(layer.rank, used)
            layer.u, layer.v = _first(layer.u, used), _first(layer.v, used)
    try:
        yield
    finally:
        for layer, u, v, rank in whole:
            layer.u, layer.v = u, v
            layer.rank = rank


def _first(factor: nn.Parameter, count: int) -> nn.Parameter:
    return nn.Parameter(factor.detach()[:count], requires_grad=factor.requires_grad)
