"""Gauge alignment: what one layer's forward takes in each form, and the error of the form by dtype (FlexRank, eq. 7).

Forms of one matrix of rank r: low-rank U Vᵀ; the paper's, whose first r outputs are the latents (slack 0); a pivoted
one, whose latents are the r outputs that row pivoting chooses (as PIFA); and ours, with the slack that the measured
error calls for. Every time is over that of a dense layer's forward, the two in turn.
"""

import functools
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexrank import collect_moments, collect_rows, decompose_, nested_layers, select_layers
from flexrank.deployment.machine import interleave, machine_facts, median_ratio
from flexrank.nn import alignment
from flexrank.nn.alignment import alignment_error, choose_slack
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.gauge_aligned import GaugeAlignedLinear
from flexrank.profiles.costs import Shape, aligned_parameters, dense_parameters, rank_block, whole_slack
from flexrank.progress import track
from research.baselines.pivoted import PivotedLinear, pivoted_order
from research.experiment import Experiment, Ledger, Request
from research.figures import GREEN, OTHER, OURS, YELLOW, draw_level, panels
from research.machine import forward_in_turn
from research.measures import nearest_rank, spearman
from research.result import Result, claim, goal, table
from research.studies.language import DECOMPOSED, datasvd_space, identity_of, pycode_settings

FORMS = {"plain": "low-rank U Vᵀ", "paper": "paper's GAR", "pivoted": "pivoted GAR", "ours": "ours, with slack"}
COLOURS = {"plain": OURS, "paper": OTHER, "pivoted": YELLOW, "ours": GREEN}
#: In the figure, by what is drawn.
LINES = {"ratios": {"marker": "o", "markersize": 3}, "counted": {"linestyle": "--", "linewidth": 1}}
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
JUDGED, TIMED = ("float32", "bfloat16", "float16"), ("float32", "bfloat16")
SHAPES: tuple[Shape, ...] = ((768, 768), (2048, 2048), (4096, 4096), (8192, 2048), (2048, 8192))
TOKENS = (1, 16, 128, 512, 2048)
#: Layers that save at least this share of their operations, slack counted, must not take longer than dense ones.
SAVING, OVER_DENSE = 0.25, 1.02
#: Rounds in turn; fewer where a dense forward takes longer than SLOW seconds. A run lasts LEAST_SECONDS at least.
REPEATS, FEW_REPEATS, SLOW, LEAST_SECONDS = 9, 5, 0.1, 2e-3
#: A cost off the counted one by at most this part follows it closely, in layers that are WIDE at MANY tokens.
CLOSE, WIDE, MANY = 0.15, 2048, 512
#: The most layers, evenly spread, that are judged, and the most batches that they are judged on.
LAYERS, BATCHES = 48, 16

Row = dict[str, Any]


@torch.no_grad()
def run(request: Request) -> Result:
    """Errors first, since the slack that they call for is what is timed."""
    config = request.config
    assert config is not None
    datasvd_space(request)  # refuses an unfit configuration before anything is computed
    key = {**identity_of(config, DECOMPOSED), "shares": SHARES, "batches": BATCHES, "layers": LAYERS}
    key |= {"slack_steps": alignment.SLACK_STEPS, "multiple": alignment.ERROR_MULTIPLE}
    errors = _errors(Ledger(request.work, key), request)
    summaries = {dtype: _summaries(errors, dtype) for dtype in JUDGED}
    slacks = {dtype: _slack_shares(errors, dtype) for dtype in JUDGED}
    timed = Ledger(request.work, {**key, "machine": machine_facts()})  # times belong to a machine
    cells: list[Row] = []
    for device, dtype, shape in track([*itertools.product(devices_of(config.device), TIMED, SHAPES)], "timing forms"):
        cells += timed.take(f"{device} {dtype} {shape}", measure_shape, shape, dtype, device, slacks[dtype])
    judged, model = len({row["layer"] for row in errors}), Path(config.model).name
    claims = [_error_claim(dtype, one) for dtype, one in summaries.items()]
    goals = [_bound_goal(dtype, one, model) for dtype, one in summaries.items()]
    return {
        "settings": {"shares": SHARES, "repeats": REPEATS, "model": model, "layers": judged, "slack_shares": slacks},
        "tables": [*_time_tables(cells), _saving_table(cells), _error_table(summaries, slacks, model)],
        "claims": [*_cost_claims(cells), *claims, *goals, _saving_goal(cells)],
        "data": {"cells": cells, "errors": summaries, "model": model},
    }


class Subject(NamedTuple):
    """A decomposed model's layers, with activations to choose the slack on, and others to measure errors on."""

    layers: dict[str, NestedLayer]
    seen: dict[str, Tensor]
    unseen: dict[str, Tensor]


def load_subject(request: Request) -> Subject:
    """The configured model by DataSVD; what consolidation would train on is what the slack has not seen."""
    space = datasvd_space(request)
    model, samples = space.base, space.samples
    selected = select_layers(model, space.config.layers.include, space.config.layers.exclude)
    decompose_(model, collect_moments(model, samples.calibration, selected))
    layers = nested_layers(model)
    names, count = list(layers), min(LAYERS, len(layers))
    layers = {name: layers[name] for name in (names[index * len(names) // count] for index in range(count))}
    seen, unseen = (
        {name: rows.to(space.device) for name, rows in collect_rows(model, batches, layers).items()}
        for batches in (samples.calibration, samples.training[:BATCHES])
    )
    return Subject(layers, seen, unseen)


def _errors(ledger: Ledger, request: Request) -> list[Row]:
    """A row for each layer, share of its rank, and dtype: the slack chosen, and each form's relative output error."""
    subject = functools.cache(lambda: load_subject(request))
    names = ledger.take("layers", lambda: list(subject().layers))
    rows = []
    for name in track(names, "errors by layer"):
        for row in ledger.take(f"errors {name}", _layer_errors, subject, name):
            rows.append(row | {form: math.inf if row[form] is None else row[form] for form in FORMS})
    return rows


def _layer_errors(subject: Callable[[], Subject], name: str) -> list[Row]:
    layers, seen, unseen = subject()
    layer, rows = layers[name], []
    for share in SHARES:
        rank = max(1, min(round(share * layer.max_rank), layer.max_rank - 1))
        u, v = layer.u[:rank].T.double(), layer.v[:rank].T.double()
        order = pivoted_order(u)
        # Gauge alignment inverts the r rows of U that become latents.
        blocks = {"paper": u[:rank], "pivoted": u[order[:rank]]}
        condition = {form: _finite(float(torch.linalg.cond(block))) for form, block in blocks.items()}
        for dtype in JUDGED:
            precision = getattr(torch, dtype)
            slack = choose_slack(u, v, seen[name], precision)
            forms = {"plain": (u, rank), "paper": (u, 0), "pivoted": (u[order], 0), "ours": (u, slack)}
            row = {"layer": name, "share": share, "dtype": dtype, "rank": rank, "slack": slack, "condition": condition}
            for form, (rotated, columns) in forms.items():
                row[form] = _finite(alignment_error(rotated, v, columns, unseen[name], precision))
            rows.append(row)
    return rows


def _finite(number: float) -> float | None:
    """None for what overflows: JSON has no infinity."""
    return number if math.isfinite(number) else None


def _slack_shares(errors: Sequence[Row], dtype: str) -> list[float]:
    """The median over layers of slack / rank at each share: a wide layer needs a like part of its rank."""
    rows = [row for row in errors if row["dtype"] == dtype]
    return [statistics.median(r["slack"] / r["rank"] for r in rows if r["share"] == share) for share in SHARES]


def _summaries(errors: Sequence[Row], dtype: str) -> dict[str, Row]:
    """By form: errors, multiples of low-rank U Vᵀ's, and how many are within ours; where U Vᵀ itself is finite."""
    rows = [row for row in errors if row["dtype"] == dtype and math.isfinite(row["plain"])]
    floor, summaries = alignment.ERROR_FLOOR[getattr(torch, dtype)], {}
    for form in FORMS:
        own, times = [row[form] for row in rows], [row[form] / row["plain"] for row in rows]
        numbers = {
            "least": min(own), "median": statistics.median(own), "most": max(own),
            "median_times": statistics.median(times), "worst_times": max(times),
        }  # fmt: skip
        within = sum(row[form] <= max(alignment.STATED_MULTIPLE * row["plain"], floor) for row in rows)
        summaries[form] = {key: _finite(number) for key, number in numbers.items()}
        summaries[form] |= {"within": within, "ranks": len(rows)}
        summaries[form] |= _conditions([row["condition"].get(form) for row in rows], times)
    return summaries


def _conditions(conditions: Sequence[float | None], times: Sequence[float]) -> dict[str, float]:
    """Of what a form inverts: the median condition, and how far the error goes with it; nothing of the other forms."""
    known = [(c, t) for c, t in zip(conditions, times, strict=True) if c is not None and math.isfinite(t)]
    if any(len(set(values)) < 2 for values in zip(*known, strict=True)) or not known:
        return {}
    own, others = zip(*known, strict=True)
    return {"condition": statistics.median(own), "rho": spearman(own, others)}


def devices_of(wanted: str) -> list[str]:
    """The device that the configuration names, or with `auto` this CPU, and a GPU where there is one."""
    return [wanted] if wanted != "auto" else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def measure_shape(shape: Shape, dtype: str, device: str, slacks: Sequence[float]) -> list[Row]:
    """For each number of tokens and rank: each form's time over dense, and its operations over dense."""
    precision, cells = getattr(torch, dtype), []
    sizes = layer_sizes(shape, slacks, dtype)
    dense = functools.partial(nn.Linear, shape[1], shape[0], bias=False, device=device, dtype=precision)
    builds: list[Callable[[], nn.Module]] = [dense]
    for _, rank, slack in sizes:
        builds += builders(shape, rank, slack, precision, device).values()
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1], device=device).to(precision)
        seconds, *ratios = _over_first([forward_in_turn(build, x) for build in builds])
        where = {"shape": list(shape), "dtype": dtype, "device": device, "tokens": tokens, "dense_seconds": seconds}
        for (share, rank, slack), own in zip(sizes, zip(*[iter(ratios)] * len(FORMS), strict=True), strict=True):
            columns = zip(FORMS, (rank, 0, 0, slack), strict=True)
            counted = {form: aligned_parameters(shape, rank, p) / dense_parameters(shape) for form, p in columns}
            size = {"share": share, "rank": rank, "slack": slack}
            cells.append({**where, **size, "ratios": dict(zip(FORMS, own, strict=True)), "counted": counted})
    return cells


def layer_sizes(shape: Shape, slacks: Sequence[float], dtype: str) -> list[tuple[float | None, int, int]]:
    """Share of the full rank, rank of whole blocks and slack; and last, of no share, the largest that saves enough."""
    block, full = rank_block(shape), min(shape)

    def slack_columns(rank: int, part: float) -> int:
        return whole_slack(shape, rank, max(1, round(part * rank)), dtype)

    ranks = [min(nearest_rank(shape, share), full - block) for share in SHARES]
    sizes = [(at, rank, slack_columns(rank, part)) for at, rank, part in zip(SHARES, ranks, slacks, strict=True)]
    limit, part = (1 - SAVING) * dense_parameters(shape), statistics.median(slacks)
    fewer = ((rank, slack_columns(rank, part)) for rank in range(full - block, 0, -block))
    return [*sizes, (None, *next(size for size in fewer if aligned_parameters(shape, *size) <= limit))]


def builders(
    shape: Shape, rank: int, slack: int, dtype: torch.dtype, device: str
) -> dict[str, Callable[[], nn.Module]]:
    """For each of FORMS what builds a layer, with random weights."""
    aligned = functools.partial(GaugeAlignedLinear, shape, rank, bias=False, device=device, dtype=dtype)
    order = torch.randperm(shape[0], device=device)
    return {
        "plain": functools.partial(aligned, aligned=0),
        "paper": functools.partial(aligned, aligned=rank),
        "pivoted": functools.partial(PivotedLinear, shape[1], rank, order, dtype=dtype),
        "ours": functools.partial(aligned, aligned=rank - slack),
    }


def _over_first(runs: Sequence[Callable[[int], None]]) -> list[float]:
    """The first run's median seconds for one call, and each other's time over it."""
    (first,) = interleave([functools.partial(runs[0], 1)], 3)
    once = statistics.median(first)
    calls = max(1, round(LEAST_SECONDS / once))
    repeats = FEW_REPEATS if once > SLOW else REPEATS
    base, *others = interleave([functools.partial(run, calls) for run in runs], repeats, warmup=1)
    return [statistics.median(base) / calls, *(median_ratio(seconds, base) for seconds in others)]


def _grouped(cells: Iterable[Row], *keys: str) -> list[tuple[Any, list[Row]]]:
    """Cells that follow one another and agree in these, together."""
    return [(values, list(group)) for values, group in itertools.groupby(cells, operator.itemgetter(*keys))]


def _by_kind(cells: Iterable[Row]) -> list[tuple[Any, list[Row]]]:
    """The cells of each device and dtype, at shares of the rank."""
    return _grouped((cell for cell in cells if cell["share"]), "device", "dtype")


def _where(row: Row) -> str:
    return f"{row['shape'][0]} × {row['shape'][1]}, {row['tokens']} tokens"


def _time_tables(cells: Sequence[Row]) -> list[dict[str, Any]]:
    """For each device and dtype: time over dense and operations over dense, by shape, tokens and form."""
    tables = []
    for kind, of_kind in _by_kind(cells):
        rows = []
        for _, of in _grouped(of_kind, "shape", "tokens"):
            where = _where(of[0])
            rows += [[f"{where}: {name}", *(cell["ratios"][form] for cell in of)] for form, name in FORMS.items()]
            rows.append([f"{where}: operations of ours", *(cell["counted"]["ours"] for cell in of)])
        title = f"time over a dense layer's, at whole blocks nearest to shares of the full rank: {', '.join(kind)}"
        tables.append(table(title, ["form", *SHARES], rows, digits=2))
    return tables


def _saving_table(cells: Sequence[Row]) -> dict[str, Any]:
    rows = [
        [f"{device}, {dtype}, {shape[0]} × {shape[1]}", of[0]["rank"], of[0]["slack"], of[0]["counted"]["ours"],
         *(cell["ratios"]["ours"] for cell in of)]
        for (device, dtype, shape), of in _grouped((c for c in cells if not c["share"]), "device", "dtype", "shape")
    ]  # fmt: skip
    columns = ["layer", "rank", "slack", "operations", *(f"{tokens} tokens" for tokens in TOKENS)]
    largest = f"the largest rank of whole blocks that saves {SAVING:g} of the operations, slack counted"
    return table(f"time over dense at {largest}", columns, rows, digits=2)


def _error_table(summaries: Mapping[str, Any], slacks: Mapping[str, list[float]], model: str) -> dict[str, Any]:
    rows = []
    for dtype, form in itertools.product(summaries, FORMS):
        one = summaries[dtype][form]
        slack = statistics.median(slacks[dtype]) if form == "ours" else None
        numbers = (one[key] for key in ("median", "median_times", "worst_times"))
        rows.append([f"{dtype}: {FORMS[form]}", *numbers, one["within"] / one["ranks"], slack, one.get("condition")])
    columns = ["median error", "over low-rank's, median", "worst", "within our bound", "slack / rank", "condition"]
    title = f"relative output error at {one['ranks']} ranks of {model}'s layers, on activations unseen (–: overflow)"
    return table(title, ["form", *columns], rows, digits=(4, 2, 2, 3, 3, 1))


def _cost_claims(cells: Sequence[Row]) -> list[dict[str, Any]]:
    """What the paper says of the cost, for each device and dtype; of wide layers at many tokens, if there are any."""
    claims = []
    for kind, of_kind in _by_kind(cells):
        wide = [cell for cell in of_kind if min(cell["shape"]) >= WIDE and cell["tokens"] >= MANY] or of_kind
        over = [cell["ratios"][form] / cell["counted"][form] for form in ("plain", "paper") for cell in wide]
        last, where = [cell for cell in wide if cell["share"] == SHARES[-1]], f"({', '.join(kind)})"
        plain = [cell["ratios"]["plain"] for cell in last]
        doubled = [cell["ratios"]["plain"] / cell["counted"]["plain"] for cell in last]
        off_plain, off = (max(abs(ratio - 1) for ratio in ratios) for ratios in (doubled, over))
        worst = max(wide, key=lambda cell: cell["ratios"]["paper"])
        most = worst["ratios"]["paper"]
        claims += [
            claim(f"low-rank U Vᵀ costs up to 2× a dense layer {where}", "up to 2",
                  f"{_span(plain)} at {SHARES[-1]:g} of the full rank", off_plain <= CLOSE, "not known"),
            claim(f"GAR always costs less than a dense layer, even at almost full rank {where}", "always below 1",
                  f"at most {most:.2f} ({_where(worst)}, {worst['share']:g})", most < 1, "not known"),
            claim(f"the cost closely follows the theory, here within {CLOSE:.0%} {where}", "closely",
                  f"measured over counted, low-rank and GAR: {_span(over)}", off <= CLOSE, "not known"),
        ]  # fmt: skip
    return claims


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _error_claim(dtype: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    own, aligned = summary["paper"], {form: one for form, one in summary.items() if form != "plain"}
    here = "; ".join(
        f"{FORMS[form]} worst ×{_times_text(one['worst_times'])}, median ×{_times_text(one['median_times'])}"
        for form, one in aligned.items()
    )
    why = f"equal only in exact arithmetic; within our stated bound at {own['within']} of {own['ranks']} ranks"
    if "rho" in own:
        why += f"; it goes with the condition of the block of U that it inverts, Spearman ρ {own['rho']:.2f}"
    what = f"eq. 7 changes no output ({dtype} error over low-rank U Vᵀ's)"
    return claim(what, "equal", here, own["within"] == own["ranks"], why)


def _bound_goal(dtype: str, summary: Mapping[str, Any], model: str) -> dict[str, Any]:
    ours, floor = summary["ours"], alignment.ERROR_FLOOR[getattr(torch, dtype)]
    here = f"worst {_times_text(ours['worst_times'])}; {ours['within']} of {ours['ranks']} within"
    what = f"{dtype} error with slack over low-rank U Vᵀ's, at {ours['ranks']} ranks of {model}'s layers"
    most = f"at most {alignment.STATED_MULTIPLE:g}, or {floor:g} in all"
    return goal(what, most, here, ours["within"] == ours["ranks"])


def _saving_goal(cells: Sequence[Row]) -> dict[str, Any]:
    saving = [cell for cell in cells if not cell["share"]]
    worst = max(saving, key=lambda cell: cell["ratios"]["ours"])
    within = sum(cell["ratios"]["ours"] <= OVER_DENSE for cell in saving)
    where = f"{worst['device']}, {worst['dtype']}, {_where(worst)}"
    here = f"worst {worst['ratios']['ours']:.2f} ({where}); {within} of {len(saving)} within"
    what = f"a layer that saves at least {SAVING:g} of its operations, over dense"
    return goal(what, f"at most {OVER_DENSE}", here, within == len(saving))


def _times_text(number: float | None) -> str:
    return "∞" if number is None else f"{number:.3g}"


def draw(data: Mapping[str, Any]) -> Any:
    """Time over dense by share of the rank at the most tokens, operations dashed; on the right, errors by dtype."""
    most = max(cell["tokens"] for cell in data["cells"])
    kinds = _by_kind(cell for cell in data["cells"] if cell["tokens"] == most)
    columns = len(_grouped(kinds[0][1], "shape")) + 1
    figure, places = panels(columns, (3 * columns, 2.8 * len(kinds)), rows=len(kinds))
    for number, (kind, cells) in enumerate(kinds):
        *row, last = places[number * columns : (number + 1) * columns]
        for axes, (shape, of) in zip(row, _grouped(cells, "shape"), strict=True):
            draw_level(axes, 1, linestyle="-")
            for (form, name), (key, style) in itertools.product(FORMS.items(), LINES.items()):
                heights = [cell[key][form] for cell in of]
                axes.plot([cell["share"] for cell in of], heights, color=COLOURS[form], label=name, **style)
            axes.set_title(f"{shape[0]} × {shape[1]}, {', '.join(kind)}", loc="left", fontsize=9)
            axes.set_ylim(0, 2.2)
        for place, (form, one) in enumerate(data["errors"][kind[1]].items()):
            span = [one[key] for key in ("least", "median", "most") if one[key] is not None]
            last.plot([place] * len(span), span, color=COLOURS[form], linewidth=2)
            last.plot([place] * len(span[1:2]), span[1:2], color=COLOURS[form], marker="o", markersize=5)
        last.set(yscale="log", xticks=[])
        last.set_title(f"{kind[1]} output error, {data['model']}", loc="left", fontsize=9)
    solid = places[0].get_lines()[1::2]
    places[0].legend(handles=solid, fontsize=7, loc="upper left")
    figure.supylabel(f"time over dense, {most} tokens", fontsize=9)
    figure.supxlabel("share of the full rank", fontsize=9)
    return figure


EXPERIMENT = Experiment(
    name="gar", title="What gauge alignment saves, and what it costs in accuracy",
    shows="one layer's forward time in four forms against a dense layer and the operations counted, errors by dtype,"
    " and the time of layers that save a quarter of their operations",
    paper="plain costs up to 2× dense, GAR always less than dense, close to theory (Training and inference efficiency)",
    minutes=10, run=run, draw=draw, settings=lambda full: pycode_settings(),
    tried=(
        "a permutation of the output, which costs a pass over it at every rank",
        "latents written straight into a wider output, quicker near full rank in bfloat16 and slower at half",
    ),
)  # fmt: skip
