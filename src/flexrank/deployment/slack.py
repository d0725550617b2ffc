"""Slack: how many columns of each layer gauge alignment leaves unaligned, so that a dtype's error bound is kept."""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.errors import FlexrankError
from flexrank.files import dtype_name
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.gauge_aligned import Slack, resolve_slack
from flexrank.nn.switch import nested_layers
from flexrank.profiles import SlackTable
from flexrank.profiles.costs import LayerFormat, layer_format
from flexrank.progress import track

Activations = Mapping[str, Tensor]


def find_slack(
    model: nn.Module,
    profiles: Iterable[Mapping[str, int]],
    *,
    dtype: torch.dtype | None = None,
    slack: Slack = "auto",
    activations: Activations | None = None,
    known: SlackTable | None = None,
) -> SlackTable:
    """The slack of every layer at the ranks of these profiles, to deploy any of them with.

    Args:
        model: elastic, with the weights that are deployed.
        profiles: such as those of a chain's requested entries.
        dtype: as for `deploy`, and so are `slack` and `activations`.
        known: of the same model and dtype; what it holds is not chosen again.
    """
    layers = nested_layers(model)
    dtype = dtype or next(iter(layers.values())).u.dtype
    columns = {name: dict(known.columns.get(name, {})) if known else {} for name in layers}
    wanted = {(name, rank): None for profile in profiles for name, rank in profile.items() if rank not in columns[name]}
    for name, rank in track(list(wanted), "choosing slack") if len(wanted) > len(layers) else wanted:
        columns[name][rank] = layer_slack(name, layers[name], rank, slack, dtype, activations or {})
    return SlackTable(dtype_name(dtype), columns)


def layer_slack(
    name: str, layer: NestedLayer, rank: int, slack: Slack | SlackTable, dtype: torch.dtype, activations: Activations
) -> int:
    """The columns that one layer leaves unaligned at this rank; 0 where it is dense whatever the slack."""
    if layer_format(layer.matrix_shape, rank) is LayerFormat.DENSE:
        return 0
    if isinstance(slack, SlackTable):
        slack.require_dtype(dtype_name(dtype))
        return slack.at(name, rank)
    columns: Slack = slack if slack == "auto" else min(slack, rank)
    try:
        return resolve_slack(*prefix_factors(layer, rank), columns, dtype, activations.get(name))
    except FlexrankError as error:
        raise FlexrankError(f"layer {name!r}: {error}") from error


def prefix_factors(layer: NestedLayer, rank: int) -> tuple[Float[Tensor, "m r"], Float[Tensor, "n r"]]:
    """U and V of the layer's first components, in float64."""
    u, v = layer.factors(rank)
    return u.detach().T.double(), v.detach().T.double()
