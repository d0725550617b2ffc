"""How each layer is to be deployed, dense, plain or gauge-aligned: within limits, and no slower than the base."""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flexrank.costs import aligned_parameters, dense_parameters
from flexrank.errors import FlexrankError
from flexrank.layers import NestedLayer, Slack, resolve_slack
from flexrank.profiles import ChainEntry, ProfileChain, RankProfile
from flexrank.surgery import footprint, nested_layers
from flexrank.timing import TOKENS, FormKey, Load, TimeTable, timed_slack

log = logging.getLogger("flexrank")

Activations = Mapping[str, Tensor]

#: A model that is as fast as its base is looked for down to this part of the size that its limits allow, before layers
#: are dense in it.
LEAST_SIZE = 0.6


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


def fit_profile(
    model: torch.nn.Module, chain: ProfileChain, budget: float | None = None, **limits_and_settings: Any
) -> RankProfile:
    """The profile of `fit_plans`: the chain's largest whose deployed model is within every limit, slack included.

    Raises:
        FlexrankError: as `fit_plans`; or `times` are given, which choose forms, and a profile has none.
    """
    if limits_and_settings.get("times") is not None:
        raise FlexrankError("fit_profile gives ranks, and times choose forms; deploy the plans of fit_plans instead")
    plans = fit_plans(model, chain, budget, **limits_and_settings)
    return RankProfile({name: plan.rank for name, plan in plans.items()})


def fit_plans(
    model: torch.nn.Module,
    chain: ProfileChain,
    budget: float | None = None,
    *,
    max_params: int | None = None,
    max_bytes: int | None = None,
    max_latency_ms: float | None = None,
    dtype: torch.dtype | None = None,
    slack: Slack = "auto",
    activations: Activations | None = None,
    times: TimeTable | None = None,
    loads: Sequence[Load] | None = None,
) -> Plans:
    """How to deploy the chain's largest profile whose deployed model is within every limit, slack included.

    `chain.at` counts slack 0; this steps down from there, planning layers but building none. With `times` it goes on,
    down to `LEAST_SIZE` of that, until the linear layers together are no slower than the base's under any load; where
    no size is, the loads are left out one by one, and the log says so.

    Args:
        model: the elastic model.
        chain: its profiles.
        budget: deployed over dense parameters of the factorised layers, in (0, 1].
        max_params: the whole model's parameters.
        max_bytes: the whole model's bytes at `dtype`.
        max_latency_ms: of a chain that `time_chain` timed, as it predicts for the smallest forms; for those chosen
            where `loads` are given too, the last of which is the one that was timed.
        dtype: as for `deploy`.
        slack: as for `deploy`.
        activations: as for `deploy`.
        times: this machine's; None chooses forms by parameters alone.
        loads: what the model will be given, that which matters least first; by default each of `TOKENS` once through
            every layer.

    Raises:
        FlexrankError: no limit, one that is out of range, or none of the profiles within them.
    """
    limits: dict[str, Any] = {"max_params": max_params, "max_bytes": max_bytes, "max_latency_ms": max_latency_ms}
    chain = dataclasses.replace(chain, footprint=footprint(model, dtype))
    start = chain.entries.index(chain.entry_at(budget, **limits))
    planner = _Planner(model, dtype, slack, activations or {})
    within = functools.partial(
        is_within, model, chain, budget=budget, max_params=max_params, max_bytes=max_bytes, dtype=dtype
    )
    entries = [
        # a smaller size may take longer, where a layer is no longer dense
        entry
        for entry in reversed(chain.entries[: start + 1])
        if max_latency_ms is None or chain.milliseconds(entry) <= max_latency_ms
    ]
    first = next((entry for entry in entries if within(planner.smallest(entry))), None)
    asked = ", ".join(f"{name}={value}" for name, value in {"budget": budget, **limits}.items() if value is not None)
    if first is None:
        raise FlexrankError(f"too small for the deployed form, slack included: {asked}; ask for more, or slack=0")
    if times is None:
        return planner.smallest(first)
    near = [entry for entry in entries if LEAST_SIZE * first.parameters <= entry.parameters]
    is_fast = functools.partial(_is_fast, model, chain, max_latency_ms, times, loads)
    loads = loads or default_loads(nested_layers(model))
    for left_out in range(len(loads)):
        found = map(functools.partial(planner.no_slower, times=times, loads=loads[left_out:]), near)
        plans = next((plans for plans in found if within(plans) and is_fast(plans)), None)
        if plans is not None:
            return plans
        wanted = "the base" if max_latency_ms is None else "the base, or as was asked,"
        log.warning("%s: no size near is as fast as %s at %s", asked, wanted, loads[left_out])
    return planner.smallest(first)


def default_loads(layers: Iterable[str]) -> list[Load]:
    """Each of `TOKENS` once through every layer."""
    names = list(layers)
    return [Load({name: (tokens,) for name in names}) for tokens in TOKENS]


def is_within(
    model: torch.nn.Module,
    chain: ProfileChain,
    plans: Plans,
    budget: float | None = None,
    *,
    max_params: int | None = None,
    max_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> bool:
    """Whether the plans' own sizes, slack included, are within the limits of `fit_plans`; latency is not looked at."""
    chain = dataclasses.replace(chain, footprint=footprint(model, dtype))
    real = dataclasses.replace(chain.entries[0], parameters=sum(plan.parameters for plan in plans.values()))
    sizes = chain.relative_size(real), chain.model_parameters(real), chain.model_bytes(real)
    limits = budget, max_params, max_bytes
    return all(limit is None or size <= limit * (1 + 1e-12) for limit, size in zip(limits, sizes, strict=True))


def forms_of_plans(plans: Plans) -> dict[str, list[Any]]:
    """Rank and form ("dense", "plain" or "aligned") of each layer, as JSON; slack is the weights' own."""
    forms = {}
    for name, plan in plans.items():
        low_rank = "plain" if plan.slack == plan.rank else "aligned"
        forms[name] = [plan.rank, "dense" if plan.slack is None else low_rank]
    return forms


def plans_of_forms(
    model: torch.nn.Module,
    forms: Mapping[str, Sequence[Any]],
    *,
    dtype: torch.dtype | None = None,
    slack: Slack = "auto",
    activations: Activations | None = None,
) -> Plans:
    """The plans with these ranks and forms; the slack of aligned layers is chosen for this model's weights."""
    planner, layers, plans = _Planner(model, dtype, slack, activations or {}), nested_layers(model), {}
    for name, (rank, form) in forms.items():
        if form == "aligned":
            plans[name] = planner.layer(name, rank)
        else:
            plain = LayerPlan(rank, rank, rank * sum(layers[name].matrix_shape))
            plans[name] = plain if form == "plain" else planner.dense(name)
    return plans


def _is_fast(
    model: torch.nn.Module,
    chain: ProfileChain,
    max_latency_ms: float | None,
    times: TimeTable,
    loads: Sequence[Load] | None,
    plans: Plans,
) -> bool:
    """Whether the plans' own forms are within the limit: the chain's largest size, with other forms in its place."""
    if max_latency_ms is None or not loads:
        return True
    layers = {name: layer for name, layer in nested_layers(model).items() if layer.geometry is None}
    largest = chain.entries[-1]
    rise = 0.0
    for name, layer in layers.items():
        plan = plans[name]
        rise += loads[-1].seconds(times, name, form_key(layer), plan.rank, plan.slack)
        rise -= predicted_seconds(name, layer, largest.profile[name], loads[-1], times)
    return chain.milliseconds(largest) + 1e3 * rise <= max_latency_ms * (1 + 1e-9)


class _Planner:
    """Plans layers; each layer and rank once."""

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype | None,
        slack: Slack,
        activations: Activations,
    ):
        self._layers = nested_layers(model)
        self._dtype, self._slack, self._activations = dtype, slack, activations
        self._known: dict[tuple[str, int], LayerPlan] = {}

    def smallest(self, entry: ChainEntry) -> Plans:
        """The forms with fewest parameters."""
        return {name: self.layer(name, rank) for name, rank in entry.profile.items()}

    def layer(self, name: str, rank: int) -> LayerPlan:
        """The form with fewest parameters."""
        if (name, rank) not in self._known:
            rows = self._activations.get(name)
            plan = plan_layer(self._layers[name], rank, dtype=self._dtype, slack=self._slack, rows=rows)
            self._known[name, rank] = self.dense(name) if plan.slack is None else plan
        return self._known[name, rank]

    def no_slower(self, entry: ChainEntry, times: TimeTable, loads: Sequence[Load]) -> Plans:
        """The forms of `plan_no_slower`."""
        smallest = self.smallest(entry)
        dense = {name: self.dense(name) for name in smallest}
        return plan_no_slower(smallest, dense, self._layers, times, loads)

    def dense(self, name: str) -> LayerPlan:
        """At full rank."""
        layer = self._layers[name]
        return LayerPlan(layer.max_rank, None, dense_parameters(layer.matrix_shape))


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


def predicted_seconds(name: str, layer: NestedLayer, rank: int, load: Load, times: TimeTable) -> float:
    """Of the form with fewest parameters, at the slack that the table was timed with."""
    shape = layer.matrix_shape
    slack = timed_slack(rank)
    is_dense = aligned_parameters(shape, rank, slack) >= dense_parameters(shape)
    return load.seconds(times, name, form_key(layer), rank, None if is_dense else slack)


def form_key(layer: NestedLayer) -> FormKey:
    """What the layer's times are found by."""
    return FormKey(layer.matrix_shape, layer.bias is not None)


def _larger_forms(plan: LayerPlan, dense: LayerPlan, layer: NestedLayer) -> list[LayerPlan]:
    plain = LayerPlan(plan.rank, plan.rank, plan.rank * sum(layer.matrix_shape))
    # Plain at half the rank of a square layer is as large as dense: only the latter is surely no slower.
    found = [plain] if plan.parameters < plain.parameters < dense.parameters else []
    return [*found, dense] if plan.parameters < dense.parameters else found
