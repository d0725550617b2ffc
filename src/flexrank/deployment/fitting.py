"""The largest size of a chain whose deployed model is within limits, slack included, and no slower than the base."""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from flexrank.deployment.planning import Activations, Planner, Plans, form_key, plan_least_error, predicted_seconds
from flexrank.deployment.timing import TOKENS, Load, TimeTable
from flexrank.errors import FlexrankError
from flexrank.nn.layers import Slack
from flexrank.nn.surgery import footprint
from flexrank.profiles import ChainEntry, ProfileChain, RankProfile, SensitivityTable

log = logging.getLogger("flexrank")

#: A model that is as fast as its base is looked for down to this part of the size that its limits allow, before layers
#: are dense in it.
LEAST_SIZE = 0.6


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a deployed model must be within; at least one of them.

    Attributes:
        budget: deployed over dense parameters of the factorised layers, in (0, 1].
        max_params: the whole model's parameters.
        max_bytes: the whole model's bytes at the dtype deployed in.
        max_latency_ms: of a chain that `time_chain` timed, as it predicts; for the forms chosen where loads are given
            too, the last of which is the one that was timed.
    """

    budget: float | None = None
    max_params: int | None = None
    max_bytes: int | None = None
    max_latency_ms: float | None = None

    def given(self) -> dict[str, Any]:
        """Those that are not None."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.given().items())


class Fit(NamedTuple):
    """What `fit` found.

    Attributes:
        plans: how to deploy each layer.
        slow: loads that were given up, that which matters least first: with them no size near was fast enough.
        is_quickest: the forms are the quickest. Where they were asked for and no size near has them within the limits,
            the smallest take their place.
    """

    plans: Plans
    slow: Sequence[Load] = ()
    is_quickest: bool = False


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
    sensitivity: SensitivityTable | None = None,
) -> Plans:
    """How to deploy the chain's largest profile whose deployed model is within every limit, slack included.

    `chain.at` counts slack 0; this steps down from there, planning layers but building none. With `times` it goes on,
    down to `LEAST_SIZE` of that, until the linear layers together are no slower than the base's under any load; where
    no size is, the loads are left out one by one, and the log says so. Forms are the smallest that do; for a latency
    that the chain was timed for in the quickest forms, those: at low rank plain U Vᵀ, a little larger, is quicker.

    Args:
        model: the elastic model.
        chain: its profiles.
        budget: deployed over dense parameters of the factorised layers, in (0, 1].
        max_params: the whole model's parameters.
        max_bytes: the whole model's bytes at `dtype`.
        max_latency_ms: of a chain that `time_chain` timed; see `fitting.Limits`.
        dtype: as for `deploy`.
        slack: as for `deploy`.
        activations: as for `deploy`.
        times: this machine's; None chooses forms by parameters alone.
        loads: what the model will be given, that which matters least first; by default each of `TOKENS` once through
            every layer.
        sensitivity: that the chain was allocated by. With `times`, and no latency, ranks are then chosen together with
            forms, for the least predicted error: a layer made dense changes what is best for all others. Where none is
            fast enough, ranks are the chain's as before.

    Raises:
        FlexrankError: no limit, one that is out of range, none of the profiles within them, a latency in the quickest
            forms without `times` and `loads` to choose them by, or a sensitivity of other layers.
    """
    limits = Limits(budget, max_params, max_bytes, max_latency_ms)
    planner = Planner(model, dtype=dtype, slack=slack, activations=activations)
    found = fit(planner, chain, limits, times, loads, sensitivity=sensitivity)
    for load in found.slow:
        wanted = "the base" if max_latency_ms is None else "the base, or as was asked,"
        log.warning("%s: no size near is as fast as %s at %s", limits, wanted, load)
    return found.plans


def fit(
    planner: Planner,
    chain: ProfileChain,
    limits: Limits,
    times: TimeTable | None = None,
    loads: Sequence[Load] | None = None,
    *,
    is_quickest: bool = False,
    sensitivity: SensitivityTable | None = None,
) -> Fit:
    """As `fit_plans`, by a planner that may have planned before; tells what is slow, and warns of nothing.

    With `is_quickest` the forms are the quickest under the last load, whatever the limits.

    Raises:
        FlexrankError: as `fit_plans`.
    """
    chain = dataclasses.replace(chain, footprint=footprint(planner.model, planner.dtype))
    entries, most = _entries_within(chain, limits), limits.max_latency_ms
    if most is not None and chain.is_quickest and not (times and loads):
        raise FlexrankError(
            "this chain was timed in the quickest forms, which times and loads choose; give both, or "
            "time_chain(…, is_quickest=False)"
        )
    within = functools.partial(is_within, planner, chain, limits)
    first = next((entry for entry in entries if within(planner.smallest(entry))), None)
    if first is None:
        raise FlexrankError(f"too small for the deployed form, slack included: {limits}; ask for more, or slack=0")
    if times is None:
        return Fit(planner.smallest(first))
    is_fast = functools.partial(_is_fast, planner, chain, most if loads else None, times, loads or ())
    loads = loads or default_loads(planner.layers)
    if sensitivity is not None and most is None and not is_quickest:
        plans = plan_least_error(planner, sensitivity, _most_parameters(chain, limits), times, loads)
        if plans is not None:
            return Fit(plans)
    near = [entry for entry in entries if LEAST_SIZE * first.parameters <= entry.parameters]
    ways = (True, False) if is_quickest or (most is not None and chain.is_quickest) else (False,)
    for left_out, way in itertools.product(range(len(loads)), ways):
        found = (planner.no_slower(entry, times, loads[left_out:], is_quickest=way) for entry in near)
        plans = next((plans for plans in found if within(plans) and is_fast(plans)), None)
        if plans is not None:
            return Fit(plans, loads[:left_out], way)
    return Fit(planner.smallest(first), loads)


def _most_parameters(chain: ProfileChain, limits: Limits) -> int:
    """Of the factorised layers' matrices, within every limit of size."""
    other, limited = chain.footprint, []
    if limits.budget is not None:
        limited.append(limits.budget * chain.dense_parameters)
    if limits.max_params is not None:
        limited.append(limits.max_params - other.other_parameters)
    if limits.max_bytes is not None:
        limited.append((limits.max_bytes - other.other_bytes) / other.bytes_per_parameter)
    return math.floor(min(limited) * (1 + 1e-12))


def _entries_within(chain: ProfileChain, limits: Limits) -> list[ChainEntry]:
    """From the largest down; a smaller size may take longer, where a layer is no longer dense."""
    start, most = chain.entries.index(chain.entry_at(**limits.given())), limits.max_latency_ms
    entries = reversed(chain.entries[: start + 1])
    return [entry for entry in entries if most is None or chain.milliseconds(entry) <= most]


def default_loads(layers: Iterable[str]) -> list[Load]:
    """Each of `TOKENS` once through every layer."""
    names = list(layers)
    return [Load({name: (tokens,) for name in names}) for tokens in TOKENS]


def is_within(planner: Planner, chain: ProfileChain, limits: Limits, plans: Plans) -> bool:
    """Whether the plans' own sizes, slack included, are within the limits; latency is not looked at."""
    chain = dataclasses.replace(chain, footprint=footprint(planner.model, planner.dtype))
    real = dataclasses.replace(chain.entries[0], parameters=sum(plan.parameters for plan in plans.values()))
    sizes = chain.relative_size(real), chain.model_parameters(real), chain.model_bytes(real)
    asked = limits.budget, limits.max_params, limits.max_bytes
    return all(limit is None or size <= limit * (1 + 1e-12) for limit, size in zip(asked, sizes, strict=True))


def _is_fast(
    planner: Planner,
    chain: ProfileChain,
    max_latency_ms: float | None,
    times: TimeTable,
    loads: Sequence[Load],
    plans: Plans,
) -> bool:
    """Whether the plans' own forms are within the limit: the chain's largest size, with other forms in its place."""
    if max_latency_ms is None:
        return True
    largest, rise, quickest = chain.entries[-1], 0.0, chain.is_quickest
    for name, layer in planner.layers.items():
        if layer.geometry is None:
            plan = plans[name]
            rise += loads[-1].seconds(times, name, form_key(layer), plan.rank, plan.slack)
            rise -= predicted_seconds(name, layer, largest.profile[name], loads[-1], times, is_quickest=quickest)
    return chain.milliseconds(largest) + 1e3 * rise <= max_latency_ms * (1 + 1e-9)
