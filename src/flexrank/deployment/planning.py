"""How each layer of a profile is to be deployed, dense, plain or gauge-aligned: small, and no slower than the base."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flexrank.allocate.curves import LayerCurve, monotone, read_curves
from flexrank.deployment.timing import FormKey, Load, TimeTable, timed_slack
from flexrank.errors import FlexrankError
from flexrank.nn.layers import NestedLayer, Slack, resolve_slack
from flexrank.nn.surgery import nested_layers
from flexrank.profiles import ChainEntry, SensitivityTable
from flexrank.profiles.costs import aligned_parameters, dense_parameters, whole_slack

Activations = Mapping[str, Tensor]
#: Relative gap to which ranks and forms are chosen together, seconds for it at most, and how often; the solver's
#: tolerances are absolute, so that the largest error counts as SCALE, and all parameters as TIE beside it.
GAP, TIME_LIMIT, ROUNDS, SCALE, TIE = 1e-3, 10.0, 8, 1e4, 1e-2


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

    def forms(self, name: str, rank: int) -> list[LayerPlan]:
        """The forms with fewer parameters than dense; a slack that is not chosen yet is guessed."""
        layer = self.layers[name]
        plan = self._known.get((name, rank))
        if plan is None:
            slack = self._guessed_slack(name, rank) if self._slack == "auto" else min(rank, self._slack)
            plan = LayerPlan(rank, slack, aligned_parameters(layer.matrix_shape, rank, slack))
        forms = [plan, *_larger_forms(plan, self.dense(name), layer)]
        dense = dense_parameters(layer.matrix_shape)
        return [form for form in forms if form.slack is not None and form.parameters < dense]

    def _guessed_slack(self, name: str, rank: int) -> int:
        """The one that is timed, or the largest share of the rank that this layer's slack has had at another."""
        known = [plan for (layer, _), plan in self._known.items() if layer == name and plan.slack is not None]
        share = max((plan.slack / plan.rank for plan in known if plan.slack is not None), default=0.0)
        shape, dtype = self.layers[name].matrix_shape, self.dtype or self.layers[name].u.dtype
        guessed = whole_slack(shape, rank, round(share * rank), dtype)
        return min(rank, max(timed_slack(shape, rank, dtype), guessed))

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

    def of_form(self, name: str, plan: LayerPlan) -> LayerPlan:
        """The plan, with the slack that is chosen for the layer's weights where it is gauge-aligned."""
        return plan if plan.slack in (None, plan.rank) else self.layer(name, plan.rank)


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


def plan_least_error(
    planner: Planner, sensitivity: SensitivityTable, most: int, times: TimeTable, loads: Sequence[Load]
) -> Plans | None:
    """Rank and form of each layer, of least predicted error, within a size and no slower than all dense under any load.

    One integer program over the probed ranks in each form. A slack is chosen, which takes long, only for what a
    solution takes; where that does not fit then, the program is solved again.

    Args:
        planner: of the elastic model.
        sensitivity: of its layers. Errors that rise with the rank are taken for noise, as `allocate_ranks` does.
        most: parameters of the factorised layers' matrices, slack included.
        times: this machine's.
        loads: what the model will be given.

    Returns:
        None where nothing so small is so fast, or nothing was found in TIME_LIMIT seconds, ROUNDS times.

    Raises:
        FlexrankError: the sensitivity is not one, or not of these layers.
    """
    curves = _curves(planner, sensitivity)
    dense = {name: planner.dense(name) for name in planner.layers}
    if most >= sum(plan.parameters for plan in dense.values()):
        return dense
    keys = {name: form_key(layer) for name, layer in planner.layers.items() if layer.geometry is None}
    times.measure(list(keys.values()))

    def seconds(name: str, plan: LayerPlan) -> list[float]:
        """Of a convolution none are known, and none counted."""
        return [load.seconds(times, name, keys[name], plan.rank, plan.slack) if name in keys else 0.0 for load in loads]

    limit = np.sum([seconds(name, plan) for name, plan in dense.items()], axis=0)
    cap = most
    for _ in range(ROUNDS):
        choices = [(name, *choice) for name in planner.layers for choice in _choices(planner, curves[name])]
        taken = np.array([seconds(name, plan) for name, plan, _ in choices]) / np.maximum(limit, 1e-12)
        found = _least_error(choices, taken, cap)
        if found is None:
            return None
        plans = {name: planner.of_form(name, plan) for name, plan in found.items()}
        size = sum(plan.parameters for plan in plans.values())
        spent = np.sum([seconds(name, plan) for name, plan in plans.items()], axis=0)
        if size <= most and (plans == found or (spent <= limit).all()):
            return plans
        if plans == found:  # within the solver's tolerance alone
            cap -= size - most
    return None


def _curves(planner: Planner, sensitivity: SensitivityTable) -> dict[str, LayerCurve]:
    shapes = {name: layer.matrix_shape for name, layer in planner.layers.items()}
    if shapes != dict(sensitivity.shapes):
        odd = sorted(name for name, _ in shapes.items() ^ sensitivity.shapes.items())[0]
        raise FlexrankError(
            f"sensitivity: layer {odd!r} is not alike in the model and in it; give the model's own table"
        )
    return {curve.name: monotone(curve) for curve in read_curves(sensitivity)}


def _choices(planner: Planner, curve: LayerCurve) -> list[tuple[LayerPlan, float]]:
    """The layer's forms at its probed ranks, and their errors; dense first. Of a convolution, the smallest alone."""
    layer = planner.layers[curve.name]
    found = [(planner.dense(curve.name), float(np.interp(layer.max_rank, curve.ranks, curve.errors)))]
    for rank, error in zip(curve.ranks.tolist(), curve.errors.tolist(), strict=True):
        if rank <= layer.max_rank:
            forms = planner.forms(curve.name, rank)
            found += [(form, error) for form in (forms if layer.geometry is None else forms[:1])]
    return found


def _least_error(
    choices: Sequence[tuple[str, LayerPlan, float]], taken: Float[np.ndarray, "choices loads"], cap: int
) -> Plans | None:
    """One choice of each layer, of least error, within `cap` parameters and a share of 1 of each load's seconds."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    names = list(dict.fromkeys(name for name, _, _ in choices))
    rows = [names.index(name) for name, _, _ in choices]
    one_each = coo_array((np.ones(len(choices)), (rows, range(len(choices)))))
    parameters = np.array([plan.parameters for _, plan, _ in choices], float) / max(cap, 1)
    errors = np.array([error for _, _, error in choices])
    result = milp(
        SCALE * errors / (float(errors.max(initial=0)) or 1.0) + TIE * parameters,
        integrality=np.ones(len(choices), np.int64),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(parameters[None], -np.inf, 1),
            LinearConstraint(taken.T, -np.inf, 1),
        ],
        options={"mip_rel_gap": GAP, "time_limit": TIME_LIMIT},
    )
    if result.x is None:
        return None
    return {name: plan for (name, plan, _), is_taken in zip(choices, result.x > 0.5, strict=True) if is_taken}


def predicted_seconds(
    name: str, layer: NestedLayer, rank: int, load: Load, times: TimeTable, *, is_quickest: bool = False
) -> float:
    """Of the form with fewest parameters, or the least of all forms, at the slack that the table was timed with."""
    key = form_key(layer)
    slack = timed_slack(key.shape, rank, times.dtype)
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
