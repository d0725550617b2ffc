"""Slack: how many columns of each layer gauge alignment leaves unaligned, to stay within the dtype's error bound."""

from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.errors import FlexrankError
from flexrank.files import dtype_name
from flexrank.hf.classes import names_in_float32
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.gauge_aligned import Slack, resolve_slack
from flexrank.nn.specs import require_dtype
from flexrank.nn.switch import nested_layers, submodel
from flexrank.profiles import ProfileChain, SlackTable
from flexrank.profiles.costs import is_dense
from flexrank.progress import track

Activations = Mapping[str, Tensor]


def find_slack(
    model: nn.Module,
    profiles: Iterable[Mapping[str, int]] | ProfileChain,
    *,
    dtype: torch.dtype | None = None,
    slack: Slack = "auto",
    activations: Activations | None = None,
    known: SlackTable | None = None,
) -> SlackTable:
    """Chooses the slack of every layer at the ranks of these profiles, for deploying any of them.

    Args:
        model: elastic, with the weights that are deployed.
        profiles: or a chain, for its requested entries.
        dtype: as for `deploy`, like `slack` and `activations`.
        known: a table for the same model and dtype, to extend; its slack grows where vectors of these sizes need more.
    """
    layers = nested_layers(model)
    if isinstance(profiles, ProfileChain):
        profiles = [entry.profile for entry in profiles.requested]
    require_options(dtype, activations, layers)
    dtypes = deployed_dtypes(model, dtype)
    if known is not None:
        known.require_dtype(table_dtype(layers, dtype))
    columns = {name: dict(known.columns.get(name, {})) if known else {} for name in layers}
    wanted = {}
    for profile in profiles:
        for name, layer in nested_layers(submodel(model, profile)).items():
            if layer.sizes is not None or layer.rank not in columns[name]:
                wanted[name, layer.rank, layer.sizes and layer.sizes.position] = layer
    pairs = list(wanted.items())
    for (name, rank, _), layer in track(pairs, "choosing slack") if len(pairs) > len(layers) else pairs:
        least = layer_slack(name, layer, slack, dtypes[name], activations or {})
        columns[name][rank] = max(least, columns[name].get(rank, 0))
    return SlackTable(table_dtype(layers, dtype), columns)


def require_options(dtype: Any, activations: Any, layers: Mapping[str, NestedLayer]) -> None:
    """Raises FlexrankError unless these are None, or a dtype of factors and what `collect_rows` returns for these."""
    require_dtype(dtype)
    if not isinstance(activations, (Mapping, NoneType)):
        raise FlexrankError(f"activations is a {type(activations).__name__}; it is what collect_rows returns")
    for name, rows in (activations or {}).items():
        if name not in layers or rows.ndim != 2 or rows.shape[1:] != layers[name].matrix_shape[1:]:
            raise FlexrankError(f"activations of {name!r} fit no elastic layer; collect_rows gives those of this model")


def require_slack(slack: Any) -> None:
    """Raises FlexrankError unless this is a slack: a number of columns, "auto", or a table from `find_slack`."""
    is_number = isinstance(slack, int) and not isinstance(slack, bool) and slack >= 0
    if not (is_number or slack == "auto" or isinstance(slack, SlackTable)):
        raise FlexrankError(f'slack is {slack!r}; it is "auto", a whole number of columns, or what find_slack chose')


def deployed_dtypes(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype of each layer once it is deployed: float32 for those that transformers keeps so, such as T5's `wo`."""
    kept = names_in_float32(model, dtype)
    layers = nested_layers(model).items()
    return {name: torch.float32 if f"{name}.u" in kept else dtype or layer.u.dtype for name, layer in layers}


def table_dtype(layers: Mapping[str, NestedLayer], dtype: torch.dtype | None) -> str:
    """The dtype that names a model's `SlackTable`: that of the copy, by default of its first elastic layer."""
    return dtype_name(dtype or next(iter(layers.values())).u.dtype)


def layer_slack(
    name: str, layer: NestedLayer, slack: Slack | SlackTable, dtype: torch.dtype, activations: Activations
) -> int:
    """The number of columns that a layer leaves unaligned at its active size; 0 if it is dense whatever the slack."""
    if is_dense(layer.matrix_shape, layer.rank):
        return 0
    if isinstance(slack, SlackTable):
        return slack.at(name, layer.rank)
    columns: Slack = slack if slack == "auto" else min(slack, layer.rank)
    try:
        return resolve_slack(*active_factors(layer), columns, dtype, activations.get(name))
    except FlexrankError as error:
        raise FlexrankError(f"layer {name!r}: {error}") from error


def active_factors(layer: NestedLayer) -> tuple[Float[Tensor, "m r"], Float[Tensor, "n r"]]:
    """U and V of the layer's active size, in float64."""
    u, v = layer.active
    return u.detach().T.double(), v.detach().T.double()
