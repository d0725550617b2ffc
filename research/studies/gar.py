"""Gauge alignment: a layer's cost over its rank, and its error by dtype (FlexRank, Fig. on GAR's run time).

Four forms of one matrix of rank r: plain U Vᵀ; the paper's, whose first r outputs are the latents (slack 0); a pivoted
one, whose latents are the r outputs that row pivoting chooses; and ours, with a slack chosen by the measured error.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flexrank.deployment.environment import machine_facts
from torch import Tensor

from flexrank.calibrate import collect_moments, collect_rows
from flexrank.data.metrics import spearman
from flexrank.decompose import decompose_
from flexrank.nn.alignment import ERROR_FLOOR, ERROR_MULTIPLE, SLACK_STEPS, STATED_MULTIPLE, alignment_error, choose_slack
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers
from flexrank.progress import track
from research.baselines.pivoted import pivoted_order
from research.findings import Result, claim, shown, table
from research.studies.gar_cost import (
    BLOCKS,
    COLOURS,
    FORMS,
    PARTS,
    SHARES,
    TIMINGS,
    can_compile,
    cost_claims,
    cost_tables,
    devices_of,
    draw_cost,
    measure_panels,
    rank_at,
)
from research.studies.language import DECOMPOSED, checked_datasvd, load_space, pycode_settings, told_apart
from research.studies.study import Ledger, Request, Study, count_seeds

JUDGED = ("float32", "bfloat16", "float16")
#: How often the whole measurement is repeated.
REPEATS = 3
#: Width and height of the timed matrix, and tokens.
QUICK, FULL = (2048, 2048), (4096, 8192)
#: At most so many layers, evenly spread, are judged, on at most so many batches.
LAYERS, BATCHES = 48, 16


@torch.no_grad()
def run(request: Request) -> Result:
    """Errors first, since the slack that they call for is what is timed."""
    width, tokens = FULL if request.full else QUICK
    repeats, config = count_seeds(request, REPEATS, REPEATS), checked_datasvd(request)
    settings = {"width": width, "tokens": tokens, "shares": SHARES, "timings": TIMINGS}
    key = {**settings, **told_apart(config, DECOMPOSED), "batches": BATCHES, "layers": LAYERS}
    key |= {"slack_steps": SLACK_STEPS, "multiple": ERROR_MULTIPLE, "units": "by input, with condition"}
    errors = _errors(Ledger(request.work, key), request)
    summaries = _summaries(errors)
    slacks = {dtype: _slack_shares(errors, dtype) for dtype in JUDGED}
    compiles = [can_compile(device) for device in devices_of(config.device)]
    # Times belong to a machine; so do units of them.
    timed = Ledger(request.work, {**key, "parts": [*PARTS, BLOCKS], "compiles": compiles, "machine": machine_facts()})
    panels = measure_panels(timed, width, tokens, slacks, repeats, config.device)
    judged, model = len({row["layer"] for row in errors}), Path(config.model).name
    return {
        "settings": settings | {"repeats": repeats, "model": model, "layers": judged, "slack_shares": slacks},
        "tables": [
            *cost_tables(panels, f"{width} × {width}, {tokens} tokens"),
            _error_table(summaries, slacks, model),
        ],
        "claims": [
            *(one for panel in panels for one in cost_claims(panel)),
            *(_error_claim(dtype, summary) for dtype, summary in summaries.items()),
        ],
        "data": {"panels": panels, "errors": summaries, "model": model},
    }


class _Subject(NamedTuple):
    """A decomposed model's layers, with activations to choose the slack on, and others to measure errors on."""

    layers: dict[str, NestedLayer]
    seen: dict[str, Tensor]
    unseen: dict[str, Tensor]


def _decomposed(request: Request) -> _Subject:
    """The configured model by DataSVD; what consolidation would train on is what the slack has not seen."""
    space = load_space(request)
    model, samples = space.base, space.samples
    selected = select_layers(model, space.config.layers.include, space.config.layers.exclude)
    decompose_(model, collect_moments(model, samples.calibration, selected))
    layers = nested_layers(model)
    names = list(layers)
    count = min(LAYERS, len(names))
    layers = {name: layers[name] for name in (names[index * len(names) // count] for index in range(count))}
    seen, unseen = (
        {name: rows.to(space.device) for name, rows in collect_rows(model, batches, layers).items()}
        for batches in (samples.calibration, samples.training[:BATCHES])
    )
    return _Subject(layers, seen, unseen)


def _errors(ledger: Ledger, request: Request) -> list[dict[str, Any]]:
    """A row for each layer, share of its rank, and dtype: the slack chosen, and each form's relative output error."""
    subject = functools.cache(lambda: _decomposed(request))
    names = ledger.take("layers", lambda: list(subject().layers))
    rows = []
    for name in track(names, "errors by layer"):
        for row in ledger.take(f"errors {name}", functools.partial(_layer_errors, subject, name)):
            rows.append(row | {form: math.inf if row[form] is None else row[form] for form in FORMS})
    return rows


def _layer_errors(subject: Callable[[], _Subject], name: str) -> list[dict[str, Any]]:
    layers, seen, unseen = subject()
    layer, rows = layers[name], []
    for share in SHARES:
        rank = rank_at(share, layer.max_rank)
        u, v = layer.u[:rank].T.double(), layer.v[:rank].T.double()
        order = pivoted_order(u)
        condition = {"paper": _condition(u[:rank]), "pivoted": _condition(u[order[:rank]])}
        for dtype in JUDGED:
            precision = getattr(torch, dtype)
            slack = choose_slack(u, v, seen[name], precision)
            found = {
                "plain": alignment_error(u, v, rank, unseen[name], precision),
                "paper": alignment_error(u, v, 0, unseen[name], precision),
                "pivoted": alignment_error(u[order], v, 0, unseen[name], precision),
                "ours": alignment_error(u, v, slack, unseen[name], precision),
            }
            row = {"layer": name, "share": share, "dtype": dtype, "rank": rank, "slack": slack, "condition": condition}
            rows.append(row | {form: _finite(error) for form, error in found.items()})
    return rows


def _condition(block: Tensor) -> float | None:
    """What gauge alignment inverts: the condition of the r rows of U that become latents; None where singular."""
    return _finite(float(torch.linalg.cond(block)))


def _slack_shares(errors: list[dict[str, Any]], dtype: str) -> list[float]:
    """The median over layers of slack / rank at each share: a wide layer needs a like part of its rank."""
    parts: dict[float, list[float]] = {share: [] for share in SHARES}
    for row in errors:
        if row["dtype"] == dtype:
            parts[row["share"]].append(row["slack"] / row["rank"])
    return [statistics.median(found) for found in parts.values()]


def _finite(number: float) -> float | None:
    """None for what overflows: JSON has no infinity."""
    return number if math.isfinite(number) else None


def _summaries(errors: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By dtype and form: errors, their multiples of plain U Vᵀ's, and how many are within what we state for ours.

    Rows where the plain factors overflow the dtype are left out; None stands where an aligned form does.
    """
    summaries: dict[str, dict[str, Any]] = {dtype: {} for dtype in JUDGED}
    for dtype, form in itertools.product(JUDGED, FORMS):
        rows = [row for row in errors if row["dtype"] == dtype and math.isfinite(row["plain"])]
        floor, found = ERROR_FLOOR[getattr(torch, dtype)], [row[form] for row in rows]
        times = [row[form] / row["plain"] for row in rows]
        numbers = {
            "least": min(found), "median": statistics.median(found), "most": max(found),
            "median_times": statistics.median(times), "worst_times": max(times),
        }  # fmt: skip
        within = sum(row[form] <= max(STATED_MULTIPLE * row["plain"], floor) for row in rows)
        finite = {key: _finite(number) for key, number in numbers.items()}
        summaries[dtype][form] = finite | {"within": within, "ranks": len(rows)} | _conditions(rows, form)
    return summaries


def _conditions(rows: list[dict[str, Any]], form: str) -> dict[str, float]:
    """Of what a form inverts: the median condition, and how far the error goes with it; nothing of the other forms."""
    known = [(row["condition"].get(form), row[form] / row["plain"]) for row in rows]
    pairs = [(condition, times) for condition, times in known if condition is not None and math.isfinite(times)]
    if len({condition for condition, _ in pairs}) < 2 or len({times for _, times in pairs}) < 2:
        return {}
    conditions, times = zip(*pairs, strict=True)
    return {"condition": statistics.median(conditions), "rho": spearman(conditions, times)}


def _error_table(summaries: Mapping[str, Any], slacks: Mapping[str, list[float]], model: str) -> dict[str, Any]:
    rows = []
    for dtype, form in itertools.product(summaries, FORMS):
        one = summaries[dtype][form]
        slack = statistics.median(slacks[dtype]) if form == "ours" else None
        numbers = (one[key] for key in ("median", "median_times", "worst_times"))
        rows.append([f"{dtype}: {FORMS[form]}", *numbers, one["within"] / one["ranks"], slack])
    columns = ["form", "median error", "over plain's, median", "worst", "within our bound", "slack / rank"]
    title = f"relative output error at {one['ranks']} ranks of {model}'s layers, on activations unseen (–: overflow)"
    return table(title, columns, rows, digits=(4, 2, 2, 3, 3))


def _error_claim(dtype: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    ranks, forms = summary["plain"]["ranks"], [form for form in FORMS if form != "plain"]
    worst, median = ({f: summary[f][key] for f in forms} for key in ("worst_times", "median_times"))
    told = (f"{FORMS[f]} worst ×{_times(worst[f])}, median ×{_times(median[f])}" for f in forms)
    holds = summary["paper"]["within"] == ranks
    counts = ", ".join(f"{FORMS[form]} {summary[form]['within']}" for form in forms)
    why = f"equal only in exact arithmetic; within our stated bound, of {ranks} ranks: {counts}"
    if "rho" in summary["paper"]:
        inverted = {form: shown(summary[form].get("condition"), 1) for form in ("paper", "pivoted")}
        why += (
            f"; the block of U that it inverts has condition {inverted['paper']} in the median, and the error over "
            f"plain's goes with it, Spearman ρ {summary['paper']['rho']:.2f}; pivoted rows have {inverted['pivoted']}"
        )
    what = f"eq. 7 changes no output ({dtype} error over plain U Vᵀ's)"
    return claim(what, "equal", "; ".join(told), holds, "" if holds else why)


def _times(number: float | None) -> str:
    return "∞" if number is None else f"{number:.3g}"


def draw(data: Mapping[str, Any]) -> Any:
    """Cost over rank by form, counted operations dashed, a panel a device and dtype; on the right, errors by dtype."""
    from matplotlib.figure import Figure

    count = len(data["panels"])
    figure = Figure(figsize=(3.5 * (count + 1), 3.5), layout="constrained")
    *places, last = figure.subplots(1, count + 1)
    for axes, panel in zip(places, data["panels"], strict=True):
        draw_cost(axes, panel)
    places[0].set_ylabel("forward time over a dense layer's")
    places[0].legend(frameon=False, loc="upper left", fontsize=8)
    _draw_errors(last, data["errors"], data["model"])
    return figure


def _draw_errors(axes: Any, errors: Mapping[str, Any], model: str) -> None:
    for place, (dtype, form) in enumerate(itertools.product(errors, FORMS)):
        one, at = errors[dtype][form], place + place // len(FORMS)
        span = [one[key] for key in ("least", "median", "most") if one[key] is not None]
        axes.plot([at] * len(span), span, color=COLOURS[form], linewidth=2)
        axes.plot([at] * len(span[1:2]), span[1:2], color=COLOURS[form], marker="o", markersize=5)
    axes.set_yscale("log")
    axes.set_title(f"output error on {model}: median, range", loc="left", fontsize=10)
    axes.set_xticks([1.5 + 5 * place for place in range(len(errors))], list(errors))
    axes.set_ylabel("relative output error")


STUDY = Study(
    name="gar",
    title="What gauge alignment saves, and what it costs in accuracy",
    shows="one layer's forward time over rank in four forms against the operations counted, and their errors by dtype",
    paper="plain costs up to 2× dense, GAR always less than dense, close to theory (Training and inference efficiency)",
    minutes=4,
    full_minutes=60,
    run=run,
    draw=draw,
    takes_model=True,
    settings=lambda full: pycode_settings(),
)
