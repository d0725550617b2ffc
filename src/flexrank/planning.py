"""How each layer is to be deployed, dense, plain or gauge-aligned: within limits, and no slower than the base."""

import dataclasses
import logging
from collections.abc import Mapping
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
from flexrank.timing import TOKENS, FormKey, TimeTable

log = logging.getLogger("flexrank")

Activations = Mapping[str, Tensor]

#: A model that is as fast as its base is looked for down to this part of the size that its limits allow.
LEAST_SIZE = 0.9


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How one layer is deployed: its form, and the parameters of its matrix in it.

    Attributes:
        rank: r.
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
) -> Plans:
    """How to deploy the chain's largest profile whose deployed model is within every limit, slack included.

    `chain.at` counts slack 0; this steps down from there, planning layers but building none. With `times` it goes on,
    down to `LEAST_SIZE` of that, until the linear layers together are no slower than the base's at any of `TOKENS`;
    where none is, the first stands, and the log says so.

    Args:
        model: the elastic model.
        chain: its profiles.
        budget: deployed over dense parameters of the factorised layers, in (0, 1].
        max_params: the whole model's parameters.
        max_bytes: the whole model's bytes at `dtype`.
        max_latency_ms: of a chain that `time_chain` timed, as it predicts for the smallest forms.
        dtype: as for `deploy`.
        slack: as for `deploy`.
        activations: as for `deploy`.
        times: this machine's; None chooses forms by parameters alone.

    Raises:
        FlexrankError: no limit, one that is out of range, or none of the profiles within them.
    """
    limits: dict[str, Any] = {"max_params": max_params, "max_bytes": max_bytes, "max_latency_ms": max_latency_ms}
    chain = dataclasses.replace(chain, footprint=footprint(model, dtype))
    start = chain.entries.index(chain.entry_at(budget, **limits))
    planner = _Planner(model, dtype, slack, activations or {}, times)
    first: tuple[ChainEntry, Plans] | None = None
    for entry in reversed(chain.entries[: start + 1]):
        if first is not None and entry.parameters < LEAST_SIZE * first[0].parameters:
            break
        if max_latency_ms is not None and chain.milliseconds(entry) > max_latency_ms:
            continue  # a smaller size may take longer, where a layer is no longer dense
        smallest = planner.smallest(entry)
        plans = planner.no_slower(smallest)
        if _is_within(chain, entry, plans, budget, max_params, max_bytes):
            return plans
        if first is None and _is_within(chain, entry, smallest, budget, max_params, max_bytes):
            first = entry, smallest
    if first is None:
        named = f"budget={budget}, " + ", ".join(f"{name}={limit}" for name, limit in limits.items())
        raise FlexrankError(f"too small for the deployed form, slack included: {named}; ask for more, or slack=0")
    asked = ", ".join(f"{name}={value}" for name, value in {"budget": budget, **limits}.items() if value is not None)
    log.warning("%s: no size near is as fast as the base by the times measured; the smallest forms stand", asked)
    return first[1]


def _is_within(
    chain: ProfileChain,
    entry: ChainEntry,
    plans: Plans,
    budget: float | None,
    max_params: int | None,
    max_bytes: int | None,
) -> bool:
    real = dataclasses.replace(entry, parameters=sum(plan.parameters for plan in plans.values()))
    sizes = chain.relative_size(real), chain.model_parameters(real), chain.model_bytes(real)
    limits = budget, max_params, max_bytes
    return all(limit is None or size <= limit * (1 + 1e-12) for limit, size in zip(limits, sizes, strict=True))


class _Planner:
    """Plans layers; each layer and rank once."""

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype | None,
        slack: Slack,
        activations: Activations,
        times: TimeTable | None,
    ):
        self._layers = nested_layers(model)
        self._dtype, self._slack, self._activations, self._times = dtype, slack, activations, times
        self._known: dict[tuple[str, int], LayerPlan] = {}
        if times is not None:
            times.measure([form_key(layer) for layer in self._layers.values() if layer.geometry is None])

    def smallest(self, entry: ChainEntry) -> Plans:
        """The forms with fewest parameters."""
        for name, rank in entry.profile.items():
            if (name, rank) not in self._known:
                rows = self._activations.get(name)
                plan = plan_layer(self._layers[name], rank, dtype=self._dtype, slack=self._slack, rows=rows)
                self._known[name, rank] = plan
        return {name: self._known[name, rank] for name, rank in entry.profile.items()}

    def no_slower(self, plans: Plans) -> Plans:
        """`plan_no_slower` where times are known; else the plans as they are."""
        if self._times is None:
            return plans
        return plan_no_slower(plans, self._layers, self._times)


def plan_no_slower(plans: Plans, layers: Mapping[str, NestedLayer], times: TimeTable) -> Plans:
    """The plans, in which layers are plain or dense where the whole would be slower than all dense at some of TOKENS.

    The change that saves most time for each parameter it adds comes first. Convolutions are left as they are: their
    time depends on the images' size. All dense is as fast as the base, so that this ends.
    """
    chosen = dict(plans)
    linear = {name: form_key(layer) for name, layer in layers.items() if layer.geometry is None}
    changes = [(name, form) for name in linear for form in _larger_forms(plans[name], layers[name])]

    def seconds(name: str, plan: LayerPlan) -> Float[np.ndarray, " tokens"]:
        return np.array(times.seconds(linear[name], plan.rank, plan.slack))

    now = {name: seconds(name, chosen[name]) for name in linear}
    dense = sum((seconds(name, _dense(plans[name], layers[name])) for name in linear), np.zeros(len(TOKENS)))
    after = np.array([seconds(name, form) for name, form in changes]).reshape(len(changes), len(TOKENS))
    while (excess := sum(now.values(), np.zeros(len(TOKENS))) - dense * (1 + 1e-9)).max() > 0:
        worst = int((excess / np.maximum(dense, 1e-12)).argmax())
        before = np.array([now[name][worst] for name, _ in changes])
        added = np.array([form.parameters - chosen[name].parameters for name, form in changes])
        gains = np.where(added > 0, (before - after[:, worst]) / np.maximum(added, 1), -np.inf)
        best = int(gains.argmax())
        assert gains[best] > 0  # some layer is slower than dense at this count, and dense adds to its parameters
        name, chosen[changes[best][0]] = changes[best]
        now[name] = after[best]
    return chosen


def form_key(layer: NestedLayer) -> FormKey:
    """What the layer's times are found by."""
    return FormKey(layer.matrix_shape, layer.bias is not None)


def _larger_forms(plan: LayerPlan, layer: NestedLayer) -> list[LayerPlan]:
    m, n = layer.matrix_shape
    plain = LayerPlan(plan.rank, plan.rank, plan.rank * (m + n))
    dense = _dense(plan, layer)
    # Plain at half the rank of a square layer is as large as dense: only the latter is surely no slower.
    found = [plain] if plan.parameters < plain.parameters < dense.parameters else []
    return [*found, dense] if plan.parameters < dense.parameters else found


def _dense(plan: LayerPlan, layer: NestedLayer) -> LayerPlan:
    return LayerPlan(plan.rank, None, dense_parameters(layer.matrix_shape))
