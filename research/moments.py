"""Moments of two sets of samples, as one set's."""

from torch import Tensor

from flexrank.calibrate import LayerMoment, Moments
from flexrank.errors import FlexrankError


def merge_moments(first: Moments, second: Moments) -> Moments:
    """The moments of two sets of samples together; both are left as they are.

    Raises:
        FlexrankError: they differ in layers, side, or gradients.
    """
    kinds = [[(n, m.side, m.gradient_moment is None) for n, m in moments.items()] for moments in (first, second)]
    if kinds[0] != kinds[1]:
        raise FlexrankError("moments of other layers, sides or gradients cannot be merged; collect both alike")
    sums: dict[int, Tensor] = {}  # layers that share their input's moment share the sum
    merged: Moments = {}
    for name, layer in first.items():
        other, gradient = second[name], layer.gradient_moment
        moment = sums.setdefault(id(layer.moment), layer.moment + other.moment)
        if gradient is not None and other.gradient_moment is not None:
            gradient = gradient + other.gradient_moment
        mean_square, tokens = layer.mean_square + other.mean_square, layer.tokens + other.tokens
        merged[name] = LayerMoment(layer.side, moment, mean_square, tokens, gradient)
    return merged
