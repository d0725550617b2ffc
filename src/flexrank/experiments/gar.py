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
from torch import Tensor, nn

from flexrank.calibration import collect_moments, collect_rows
from flexrank.config import RunConfig
from flexrank.costs import aligned_parameters, dense_parameters, measure_ratio
from flexrank.decomposition import decompose_
from flexrank.environment import machine_facts
from flexrank.experiments.language import DECOMPOSED, checked_datasvd, load_space, pycode_settings, told_apart
from flexrank.experiments.study import Ledger, Request, Study, count_seeds
from flexrank.findings import Result, claim, shown, spread, table
from flexrank.layers import GaugeAlignedLinear, NestedLayer
from flexrank.linalg import ERROR_FLOOR, SLACK_STEPS, STATED_MULTIPLE, alignment_error, choose_slack
from flexrank.peers import PivotedLinear, pivoted_order
from flexrank.progress import track
from flexrank.surgery import nested_layers, select_layers

FORMS = {"plain": "plain U Vᵀ", "paper": "paper's GAR", "pivoted": "pivoted GAR", "ours": "ours, with slack"}
COLOURS = {"plain": "#0072B2", "paper": "#D55E00", "pivoted": "#E69F00", "ours": "#009E73"}
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
TIMED, JUDGED = ("float32", "bfloat16"), ("float32", "bfloat16", "float16")
#: How often the whole measurement is repeated, and timings of a layer (after one to warm up) in each.
REPEATS, TIMINGS = 3, 5
#: Width and height of the timed matrix, and tokens.
QUICK, FULL = (2048, 2048), (4096, 8192)
#: A measured cost that is off the counted one by at most this part follows it closely.
CLOSE = 0.15
#: At most so many layers, evenly spread, are judged, on at most so many batches.
LAYERS, BATCHES = 48, 16


@torch.no_grad()
def run(request: Request) -> Result:
    """Errors first, since the slack that they call for is what is timed."""
    width, tokens = FULL if request.full else QUICK
    repeats, config = count_seeds(request, REPEATS, REPEATS), checked_datasvd(request)
    settings = {"width": width, "tokens": tokens, "shares": SHARES, "timings": TIMINGS}
    key = {**settings, **told_apart(config, DECOMPOSED), "batches": BATCHES, "layers": LAYERS}
    key["slack_steps"] = SLACK_STEPS
    errors = _errors(Ledger(request.work, key), request)
    summaries = _summaries(errors)
    slacks = {dtype: _slack_shares(errors, dtype) for dtype in JUDGED}
    # Times belong to a machine; so do units of them.
    panels = _panels(Ledger(request.work, {**key, "machine": machine_facts()}), width, tokens, slacks, repeats, config)
    judged, model = len({row["layer"] for row in errors}), Path(config.model).name
    title = f"forward time over a dense layer's at shares of the full rank: {width} × {width}, {tokens} tokens"
    return {
        "settings": settings | {"repeats": repeats, "model": model, "layers": judged, "slack_shares": slacks},
        "tables": [_cost_table(panels, title), _error_table(summaries, slacks, model)],
        "claims": [
            *(one for panel in panels for one in _cost_claims(panel)),
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
        rank = _rank(share, layer.max_rank)
        u, v = layer.u[:rank].T.double(), layer.v[:rank].T.double()
        order = pivoted_order(u)
        for dtype in JUDGED:
            precision = getattr(torch, dtype)
            slack = choose_slack(u, v, seen[name], precision)
            found = {
                "plain": alignment_error(u, v, rank, unseen[name], precision),
                "paper": alignment_error(u, v, 0, unseen[name], precision),
                "pivoted": alignment_error(u[order], v, 0, unseen[name], precision),
                "ours": alignment_error(u, v, slack, unseen[name], precision),
            }
            row = {"layer": name, "share": share, "dtype": dtype, "rank": rank, "slack": slack}
            rows.append(row | {form: _finite(error) for form, error in found.items()})
    return rows


def _slack_shares(errors: list[dict[str, Any]], dtype: str) -> list[float]:
    """The median over layers of slack / rank at each share: a wide layer needs a like part of its rank."""
    parts: dict[float, list[float]] = {share: [] for share in SHARES}
    for row in errors:
        if row["dtype"] == dtype:
            parts[row["share"]].append(row["slack"] / row["rank"])
    return [statistics.median(found) for found in parts.values()]


def _panels(
    ledger: Ledger, width: int, tokens: int, slacks: Mapping[str, list[float]], repeats: int, config: RunConfig
) -> list[dict[str, Any]]:
    """For each device and dtype: the forms' costs over a dense layer's at each share, measured and counted."""
    panels = []
    for device, dtype in itertools.product(_devices(config.device), TIMED):
        time = functools.partial(_time, width, tokens, device, dtype, slacks[dtype])
        rounds = track(range(repeats), f"timing {dtype} on {device}")
        timed = [ledger.take(f"time {device} {dtype} {number}", time) for number in rounds]
        measured = {
            form: [spread(ratios) for ratios in zip(*(one[form] for one in timed), strict=True)] for form in FORMS
        }
        at = list(zip(SHARES, slacks[dtype], strict=True))
        counted = {form: [_counted(form, width, share, slack) for share, slack in at] for form in FORMS}
        panels.append({"device": device, "dtype": dtype, "shares": SHARES, "measured": measured, "counted": counted})
    return panels


def _time(width: int, tokens: int, device: str, dtype: str, slacks: list[float]) -> dict[str, list[float]]:
    """Each form's forward time over a dense layer's, the two in turn, at each share; the weights are random."""
    precision = getattr(torch, dtype)
    dense = nn.Linear(width, width, bias=False, device=device, dtype=precision)
    x = torch.randn(tokens, width, device=device).to(precision)
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for (share, slack_share), form in itertools.product(zip(SHARES, slacks, strict=True), FORMS):
        layer = _random_layer(form, width, _rank(share, width), slack_share, device, precision)
        times[form].append(measure_ratio(_forward(layer, x), _forward(dense, x), TIMINGS, warmup=1))
    return times


def _random_layer(form: str, width: int, rank: int, slack_share: float, device: str, dtype: torch.dtype) -> nn.Module:
    if form == "pivoted":
        return PivotedLinear(width, rank, torch.randperm(width, device=device), dtype=dtype)
    aligned = rank - _slack(form, rank, slack_share)
    return GaugeAlignedLinear((width, width), rank, aligned, bias=False, device=device, dtype=dtype)


def _forward(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    def forward() -> None:
        layer(x)
        if x.is_cuda:
            torch.cuda.synchronize()  # the call returns before the work is done

    return forward


def _counted(form: str, width: int, share: float, slack_share: float) -> float:
    """Multiply-adds over a dense layer's: r(m+n−r+p)/mn, where plain U Vᵀ has p = r, and the paper's form p = 0."""
    shape, rank = (width, width), _rank(share, width)
    return aligned_parameters(shape, rank, _slack(form, rank, slack_share)) / dense_parameters(shape)


def _slack(form: str, rank: int, slack_share: float) -> int:
    return {"plain": rank, "paper": 0, "pivoted": 0, "ours": round(slack_share * rank)}[form]


def _rank(share: float, full: int) -> int:
    """At least 1, and not full, where nothing would be left to align."""
    return max(1, min(round(share * full), full - 1))


def _finite(number: float) -> float | None:
    """None for what overflows: JSON has no infinity."""
    return number if math.isfinite(number) else None


def _devices(wanted: str) -> list[str]:
    """What is timed: the device that the configuration names, or with `auto` this CPU, and a GPU where there is one."""
    if wanted != "auto":
        return [wanted]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _cost_table(panels: list[dict[str, Any]], title: str) -> dict[str, Any]:
    rows = []
    for panel, (form, name) in itertools.product(panels, FORMS.items()):
        rows.append([f"{panel['device']}, {panel['dtype']}: {name}", *panel["measured"][form]])
        rows.append(["    operations counted", *panel["counted"][form]])
    return table(title, ["form", *(f"{share:g}" for share in SHARES)], rows, digits=2)


def _over_counted(panel: Mapping[str, Any], form: str) -> list[float]:
    pairs = zip(panel["measured"][form], panel["counted"][form], strict=True)
    return [measured["mean"] / counted for measured, counted in pairs]


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
        summaries[dtype][form] = finite | {"within": within, "ranks": len(rows)}
    return summaries


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


def _cost_claims(panel: Mapping[str, Any]) -> list[dict[str, Any]]:
    where, last = f"{panel['device']}, {panel['dtype']}", f"{SHARES[-1]:g} of the full rank"
    top = {form: shown(cells[-1], 2) for form, cells in panel["measured"].items()}
    worst = max(cell["mean"] for cell in panel["measured"]["paper"])
    ranges = {form: _over_counted(panel, form) for form in FORMS}
    is_double = abs(ranges["plain"][-1] - 1) <= CLOSE
    follows = all(abs(ratio - 1) <= CLOSE for form in ("plain", "paper") for ratio in ranges[form])
    told = ", ".join(f"{FORMS[form]} {min(found):.2f} to {max(found):.2f}" for form, found in ranges.items())
    setting = "settings differ: eager torch here, torch.compile on an RTX 5090 there"
    found = (
        (f"plain U Vᵀ costs up to 2× a dense layer ({where})", "up to 2",
         f"{top['plain']} at {last} (counted {panel['counted']['plain'][-1]:.2f})", is_double),
        (f"GAR always costs less than a dense layer, even at almost full rank ({where})", "always below 1",
         f"{top['paper']} at {last} (counted {panel['counted']['paper'][-1]:.3f}); pivoted {top['pivoted']}, "
         f"ours {top['ours']}", worst < 1),
        (f"the cost closely follows the theory, here within {CLOSE:.0%} ({where})", "closely",
         f"measured over counted: {told}", follows),
    )  # fmt: skip
    return [claim(what, paper, here, holds, "" if holds else setting) for what, paper, here, holds in found]


def _error_claim(dtype: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    ranks, forms = summary["plain"]["ranks"], [form for form in FORMS if form != "plain"]
    worst, median = ({f: summary[f][key] for f in forms} for key in ("worst_times", "median_times"))
    told = (f"{FORMS[f]} worst ×{_times(worst[f])}, median ×{_times(median[f])}" for f in forms)
    holds = summary["paper"]["within"] == ranks
    counts = ", ".join(f"{FORMS[form]} {summary[form]['within']}" for form in forms)
    why = f"equal only in exact arithmetic; within our stated bound, of {ranks} ranks: {counts}"
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
        _draw_cost(axes, panel)
    places[0].set_ylabel("forward time over a dense layer's")
    places[0].legend(frameon=False, loc="upper left", fontsize=8)
    _draw_errors(last, data["errors"], data["model"])
    return figure


def _draw_cost(axes: Any, panel: Mapping[str, Any]) -> None:
    shares = panel["shares"]
    axes.axhline(1, color="#555555", linewidth=0.8)
    for form, name in FORMS.items():
        means, deviations = ([cell[key] for cell in panel["measured"][form]] for key in ("mean", "sd"))
        axes.errorbar(shares, means, deviations, color=COLOURS[form], marker="o", markersize=3.5, capsize=2, label=name)
        axes.plot(shares, panel["counted"][form], color=COLOURS[form], linestyle=(0, (4, 2)), linewidth=1)
    axes.set_title(f"{panel['device']}, {panel['dtype']}; operations dashed", loc="left", fontsize=10)
    axes.set_xlabel("share of the full rank")
    axes.set_ylim(bottom=0)


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
