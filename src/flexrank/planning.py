"""How each layer of a profile is to be deployed, dense, plain or gauge-aligned: small, and no slower than the base."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flexrank.costs import aligned_parameters, dense_parameters
from flexrank.layers import NestedLayer, Slack, resolve_slack
from flexrank.profiles import ChainEntry
from flexrank.surgery import nested_layers
from flexrank.timing import FormKey, Load, TimeTable, timed_slack

Activations = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How one layer is deployed: its form, and the parameters of its matrix in it.

    Attributes:
        rank: r. A dense layer has as many parameters at every rank, so that it is planned at its full one.
        slack: columns left unaligned, from 0 to r, where r is plain U Vᵀ; None for the dense form.
        parameters: r·(m+n−r+slack), or m·n.
    """

    rank: int
    slack: int | None
    parameters: int


Plans = dict[str, LayerPlan]


def plan_layer(
    layer: NestedLayer,
    rank: int,
    *,
    dtype: torch.dtype | None = None,
    slack: Slack = "auto",
    rows: Tensor | None = None,
) -> LayerPlan:
    """The form with fewest parameters for the layer's prefix of `rank` components; `rows` (t, n) are its activations.

    Raises:
        FlexrankError: the slack is negative.
    """
    dense = dense_parameters(layer.matrix_shape)
    if aligned_parameters(layer.matrix_shape, rank) < dense:
        u, v = factors(layer, rank)
        columns = resolve_slack(u, v, slack if slack == "auto" else min(slack, rank), dtype or layer.u.dtype, rows)
        parameters = aligned_parameters(layer.matrix_shape, rank, columns)
        if parameters < dense:
            return LayerPlan(rank, columns, parameters)
    return LayerPlan(rank, None, dense)


def factors(layer: NestedLayer, rank: int) -> tuple[Float[Tensor, "m r"], Float[Tensor, "n r"]]:
    """U and V of the prefix, in float64."""
    return layer.u.detach()[:rank].T.double(), layer.v.detach()[:rank].T.double()


def forms_of_plans(plans: Plans) -> dict[str, list[Any]]:
    """Rank and form ("dense", "plain" or "aligned") of each layer, as JSON; slack is the weights' own."""
    forms = {}
    for name, plan in plans.items():
        low_rank = "plain" if plan.slack == plan.rank else "aligned"
        forms[name] = [plan.rank, "dense" if plan.slack is None else low_rank]
    return forms


class Planner:
    """Plans the layers of an elastic model; each layer and rank once, for choosing slack takes long.

    Args:
        model: the elastic model.
        dtype: as for `deploy`.
        slack: as for `deploy`.
        activations: as for `deploy`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype: torch.dtype | None = None,
        slack: Slack = "auto",
        activations: Activations | None = None,
    ):
        self.model, self.layers, self.dtype = model, nested_layers(model), dtype
        self._slack, self._activations = slack, activations or {}
        self._known: dict[tuple[str, int], LayerPlan] = {}

    def smallest(self, entry: ChainEntry) -> Plans:
        """The forms with fewest parameters."""
        return {name: self.layer(name, rank) for name, rank in entry.profile.items()}

    def layer(self, name: str, rank: int) -> LayerPlan:
        """The form with fewest parameters."""
        if (name, rank) not in self._known:
            rows = self._activations.get(name)
            plan = plan_layer(self.layers[name], rank, dtype=self.dtype, slack=self._slack, rows=rows)
            self._known[name, rank] = self.dense(name) if plan.slack is None else plan
        return self._known[name, rank]

    def dense(self, name: str) -> LayerPlan:
        """At full rank."""
        layer = self.layers[name]
        return LayerPlan(layer.max_rank, None, dense_parameters(layer.matrix_shape))

    def quickest(self, entry: ChainEntry, times: TimeTable, load: Load) -> Plans:
        """The forms that take least time under the load; of forms alike the smallest, as for a convolution."""
        plans = self.smallest(entry)
        linear = {name: form_key(layer) for name, layer in self.layers.items() if layer.geometry is None}
        times.measure(list(linear.values()))
        for name, key in linear.items():
            forms = [plans[name], *_larger_forms(plans[name], self.dense(name), self.layers[name])]
            taken = [load.seconds(times, name, key, form.rank, form.slack) for form in forms]
            plans[name] = forms[taken.index(min(taken))]
        return plans

    def no_slower(
        self, entry: ChainEntry, times: TimeTable, loads: Sequence[Load], *, is_quickest: bool = False
    ) -> Plans:
        """The forms of `plan_no_slower`, from the smallest on, or from the quickest under the last load."""
        plans = self.quickest(entry, times, loads[-1]) if is_quickest else self.smallest(entry)
        dense = {name: self.dense(name) for name in plans}
        return plan_no_slower(plans, dense, self.layers, times, loads)

    def of_forms(self, forms: Mapping[str, Sequence[Any]]) -> Plans:
        """The plans with the ranks and forms of `forms_of_plans`; slack is chosen for this model's weights."""
        plans = {}
        for name, (rank, form) in forms.items():
            if form == "aligned":
                plans[name] = self.layer(name, rank)
            else:
                plain = LayerPlan(rank, rank, rank * sum(self.layers[name].matrix_shape))
                plans[name] = plain if form == "plain" else self.dense(name)
        return plans


def plan_no_slower(
    plans: Plans, dense: Plans, layers: Mapping[str, NestedLayer], times: TimeTable, loads: Sequence[Load]
) -> Plans:
    """The plans, in which layers are plain or `dense` where the whole would be slower than all dense under some load.

    The change that saves most time for each parameter it adds comes first. Convolutions are left as they are: their
    time depends on the images' size. All dense is as fast as the base, so that this ends.
    """
    chosen = dict(plans)
    linear = {name: form_key(layer) for name, layer in layers.items() if layer.geometry is None}
    times.measure(list(linear.values()))
    changes = [(name, form) for name in linear for form in _larger_forms(plans[name], dense[name], layers[name])]

    def seconds(name: str, plan: LayerPlan) -> Float[np.ndarray, " loads"]:
        return np.array([load.seconds(times, name, linear[name], plan.rank, plan.slack) for load in loads])

    now = {name: seconds(name, chosen[name]) for name in linear}
    limit = sum((seconds(name, dense[name]) for name in linear), np.zeros(len(loads)))
    after = np.array([seconds(name, form) for name, form in changes]).reshape(len(changes), len(loads))
    while (excess := sum(now.values(), np.zeros(len(loads))) - limit * (1 + 1e-9)).max() > 0:
        worst = int((excess / np.maximum(limit, 1e-12)).argmax())
        before = np.array([now[name][worst] for name, _ in changes])
        added = np.array([form.parameters - chosen[name].parameters for name, form in changes])
        gains = np.where(added > 0, (before - after[:, worst]) / np.maximum(added, 1), -np.inf)
        best = int(gains.argmax())
        assert gains[best] > 0  # some layer is slower than dense under this load, and dense adds to its parameters
        name, chosen[changes[best][0]] = changes[best]
        now[name] = after[best]
    return chosen


def predicted_seconds(
    name: str, layer: NestedLayer, rank: int, load: Load, times: TimeTable, *, is_quickest: bool = False
) -> float:
    """Of the form with fewest parameters, or the least of all forms, at the slack that the table was timed with."""
    key, slack = form_key(layer), timed_slack(rank)
    (m, n), dense = key.shape, dense_parameters(key.shape)

    def seconds(columns: int | None) -> float:
        return load.seconds(times, name, key, rank, columns)

    if aligned_parameters(key.shape, rank, slack) >= dense:
        return seconds(None)
    if not is_quickest:
        return seconds(slack)
    return min(seconds(slack), seconds(None), *([seconds(rank)] if rank * (m + n) < dense else []))


def form_key(layer: NestedLayer) -> FormKey:
    """What the layer's times are found by."""
    return FormKey(layer.matrix_shape, layer.bias is not None)


def _larger_forms(plan: LayerPlan, dense: LayerPlan, layer: NestedLayer) -> list[LayerPlan]:
    plain = LayerPlan(plan.rank, plan.rank, plan.rank * sum(layer.matrix_shape))
    # Plain at half the rank of a square layer is as large as dense: only the latter is surely no slower.
    found = [plain] if plan.parameters < plain.parameters < dense.parameters else []
    return [*found, dense] if plan.parameters < dense.parameters else found
