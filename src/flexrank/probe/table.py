"""The ranks that are probed, and the table of their errors."""

from collections.abc import Mapping, Sequence

from torch import nn

from flexrank.nn.switch import footprint, nested_layers
from flexrank.profiles import SensitivityTable
from flexrank.profiles.costs import Spacing, rank_levels


def probed_ranks(
    model: nn.Module, num_levels: int, spacing: Spacing, min_saving: float, slack_share: float
) -> dict[str, tuple[int, ...]]:
    """The ranks of each elastic layer, rising to the full one; see `costs.rank_levels`."""
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
    return {name: rank_levels(shape, num_levels, spacing, min_saving, slack_share) for name, shape in shapes.items()}


def make_table(
    model: nn.Module, ranks: dict[str, tuple[int, ...]], errors: Mapping[str, Sequence[float]], baseline: float
) -> SensitivityTable:
    """The table of these errors, in the order of the model's layers."""
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
    ordered = {name: tuple(errors[name]) for name in shapes}
    return SensitivityTable(shapes, ranks, ordered, baseline, footprint(model))
