"""Gauge alignment: the time of one layer's forward pass in each form, and its error by dtype (FlexRank, eq. 7).

Forms of one matrix of rank r: low-rank U Vᵀ; the paper's, whose latents are the first r outputs; a pivoted one, whose
latents are r outputs chosen by row pivoting (as in PIFA); and ours, with the slack that the measured error requires.
"""

import functools
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexrank import collect_moments, collect_rows, decompose_, nested_layers, select_layers
from flexrank.deployment.machine import interleave, machine_facts, median_ratio
from flexrank.nn import alignment
from flexrank.nn.alignment import alignment_error, choose_slack
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.gauge_aligned import GaugeAlignedLinear
from flexrank.profiles.costs import MIN_SAVING, Shape, aligned_parameters, dense_parameters, rank_block, whole_slack
from flexrank.progress import track
from flexrank.run.training import autocast_dtype
from flexrank.run.workspace import Workspace
from research.baselines.pivoted import PivotedLinear, pivoted_order
from research.experiment import Experiment, Ledger, Request
from research.figures import GREEN, OTHER, OURS, YELLOW, draw_level, panels
from research.machine import rotating_forward
from research.measures import nearest_rank
from research.result import Result, claim, goal, measured, table
from research.studies.language import DECOMPOSED, datasvd_space, identity_of, pycode_settings

FORMS = {"plain": "low-rank U Vᵀ", "paper": "paper's GAR", "pivoted": "pivoted GAR", "ours": "ours, with slack"}
COLOURS = {"plain": OURS, "paper": OTHER, "pivoted": YELLOW, "ours": GREEN}
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
JUDGED, TIMED = ("float32", "bfloat16", "float16"), ("float32", "bfloat16")
SHAPES: tuple[Shape, ...] = ((768, 768), (2048, 2048), (4096, 4096), (8192, 2048), (2048, 8192))
TOKENS = (1, 16, 128, 512, 2048)
OVER_DENSE = 1.02  #: the largest time over dense of layers that save the default share of their operations
#: Rounds in turn; fewer if a dense forward pass takes over SLOW seconds. A run lasts at least LEAST_SECONDS.
REPEATS, FEW_REPEATS, SLOW, LEAST_SECONDS = 9, 5, 0.1, 2e-3
#: A cost that is off the counted one by at most this part follows it closely, in layers WIDE at MANY tokens.
CLOSE, WIDE, MANY = 0.15, 2048, 512
#: The most layers, evenly spread, that are judged, and the most batches that they are judged on.
LAYERS, BATCHES = 48, 16

Row = dict[str, Any]


@torch.no_grad()
def run(request: Request) -> Result:
    """Runs the study: errors first, because the slack that they require is what is timed."""
    space = datasvd_space(request)
    config, model = space.config, Path(space.config.model).name
    key = {**identity_of(config, DECOMPOSED), "shares": SHARES, "batches": BATCHES, "judged_layers": LAYERS}
    key |= {"slack_steps": alignment.SLACK_STEPS, "multiple": alignment.ERROR_MULTIPLE}
    errors = _errors(Ledger(request.work, key), space)
    summaries = {dtype: _summaries(errors, dtype) for dtype in JUDGED}
    slacks = {dtype: _slack_shares(errors, dtype) for dtype in JUDGED}
    key |= {"machine": machine_facts(), "timed": [TOKENS, MIN_SAVING, REPEATS]}  # times depend on the machine
    timed = Ledger(request.work, key)
    devices = [config.device] if config.device != "auto" else ["cpu", *["cuda"] * torch.cuda.is_available()]
    cells: list[Row] = []
    # A device without units for bfloat16 emulates it, and its times mean nothing.
    kinds = [(d, t) for d in devices for t in TIMED if t == "float32" or autocast_dtype("auto", torch.device(d))]
    for (device, dtype), shape in track([*itertools.product(kinds, SHAPES)], "timing forms"):
        cells += timed.take(f"{device} {dtype} {shape}", measure_shape, shape, dtype, device, slacks[dtype])
    shared, saving = ([cell for cell in cells if bool(cell["share"]) == has_share] for has_share in (True, False))
    settings = {"shares": SHARES, "repeats": REPEATS, "model": model, "layers": len({row["layer"] for row in errors})}
    tables = [*_time_tables(shared), _saving_table(saving), _error_table(summaries, slacks, model)]
    claims = [_error_claim(dtype, one) for dtype, one in summaries.items()]
    goals = [_bound_goal(dtype, one, model) for dtype, one in summaries.items()]
    claims = [*_cost_claims(shared), *claims, *goals, _saving_goal(saving)]
    return measured(settings | {"slack_shares": slacks}, tables, claims, {"cells": shared})


def load_layers(space: Workspace) -> dict[str, tuple[NestedLayer, Tensor, Tensor]]:
    """Returns layers of the model by DataSVD, each with inputs to choose its slack, and training inputs to judge it."""
    model, samples = space.base, space.samples
    selected = select_layers(model, space.config.layers.include, space.config.layers.exclude)
    decompose_(model, collect_moments(model, samples.calibration, selected))
    every = nested_layers(model)
    names, count = list(every), min(LAYERS, len(every))
    layers = {name: every[name] for name in (names[index * len(names) // count] for index in range(count))}
    parts = samples.calibration, list(itertools.islice(samples.training, BATCHES))
    seen, unseen = (collect_rows(model, part, layers) for part in parts)
    return {name: (one, seen[name].to(space.device), unseen[name].to(space.device)) for name, one in layers.items()}


def _errors(ledger: Ledger, space: Workspace) -> list[Row]:
    """Returns a row for each layer, share of its rank and dtype: the slack, and each form's relative output error."""
    layers = functools.cache(lambda: load_layers(space))
    rows = []
    for name in track(ledger.take("layers", lambda: list(layers())), "errors by layer"):
        for row in ledger.take(f"errors {name}", lambda name=name: _layer_errors(name, *layers()[name])):
            rows.append(row | {form: math.inf if row[form] is None else row[form] for form in FORMS})
    return rows


def _layer_errors(name: str, layer: NestedLayer, seen: Tensor, unseen: Tensor) -> list[Row]:
    rows = []
    for share in SHARES:
        rank = max(1, min(round(share * layer.max_rank), layer.max_rank - 1))
        u, v = layer.u[:rank].T.double(), layer.v[:rank].T.double()
        bases = dict.fromkeys(FORMS, u) | {"pivoted": u[pivoted_order(u)]}
        # Gauge alignment inverts the r rows of U that become latents.
        condition = {form: _finite(float(torch.linalg.cond(bases[form][:rank]))) for form in ("paper", "pivoted")}
        for dtype in JUDGED:
            precision = getattr(torch, dtype)
            slack = choose_slack(u, v, seen, precision)
            row = {"layer": name, "share": share, "dtype": dtype, "rank": rank, "slack": slack, "condition": condition}
            for form, columns in form_slacks(rank, slack).items():
                row[form] = _finite(alignment_error(bases[form], v, columns, unseen, precision))
            rows.append(row)
    return rows


def form_slacks(rank: int, slack: int) -> dict[str, int]:
    """Returns the slack of each of FORMS: low-rank U Vᵀ is alignment with the full rank as slack."""
    return {"plain": rank, "paper": 0, "pivoted": 0, "ours": slack}


def _finite(number: float) -> float | None:
    """Returns None for what overflows, because JSON has no infinity."""
    return number if math.isfinite(number) else None


def _slack_shares(errors: Sequence[Row], dtype: str) -> list[float]:
    """Returns the median over layers of slack / rank at each share: a wide layer needs a like part of its rank."""
    rows = [row for row in errors if row["dtype"] == dtype]
    return [statistics.median(r["slack"] / r["rank"] for r in rows if r["share"] == share) for share in SHARES]


def _summaries(errors: Sequence[Row], dtype: str) -> dict[str, Row]:
    """Returns by form, where U Vᵀ is finite: errors, multiples of U Vᵀ's, and how many are within our bound."""
    rows = [row for row in errors if row["dtype"] == dtype and math.isfinite(row["plain"])]
    floor, summaries = alignment.ERROR_FLOOR[getattr(torch, dtype)], {}
    for form in FORMS:
        own, times = [row[form] for row in rows], [row[form] / row["plain"] for row in rows]
        conditions = [row["condition"][form] for row in rows if row["condition"].get(form) is not None]
        summaries[form] = {
            "median": statistics.median(own), "median_times": statistics.median(times), "worst_times": max(times),
            "within": sum(row[form] <= max(alignment.STATED_MULTIPLE * row["plain"], floor) for row in rows),
            "ranks": len(rows), "condition": statistics.median(conditions) if conditions else None,
        }  # fmt: skip
    return summaries


def measure_shape(shape: Shape, dtype: str, device: str, slacks: Sequence[float]) -> list[Row]:
    """Returns each form's time and operations over dense, for each number of tokens and rank."""
    precision, cells = getattr(torch, dtype), []
    sizes = layer_sizes(shape, slacks, dtype)
    dense = functools.partial(nn.Linear, shape[1], shape[0], bias=False, device=device, dtype=precision)
    builds: list[Callable[[], nn.Module]] = [dense]
    for _, rank, slack in sizes:
        builds += builders(shape, rank, slack, precision, device)
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1], device=device).to(precision)
        seconds, *ratios = _over_first([rotating_forward(build, x) for build in builds])
        where = {"shape": list(shape), "dtype": dtype, "device": device, "tokens": tokens, "dense_seconds": seconds}
        in_order = iter(ratios)
        for share, rank, slack in sizes:
            columns = form_slacks(rank, slack).items()
            cells.append(where | {
                "share": share, "rank": rank, "slack": slack, "ratios": {form: next(in_order) for form in FORMS},
                "counted": {form: aligned_parameters(shape, rank, p) / dense_parameters(shape) for form, p in columns},
            })  # fmt: skip
    return cells


def layer_sizes(shape: Shape, slacks: Sequence[float], dtype: str) -> list[tuple[float | None, int, int]]:
    """Returns, for each share of the full rank, the share, a rank in whole blocks and its slack.

    The last one, of no share, has the largest rank that saves enough.
    """
    block, full = rank_block(shape), min(shape)

    def sized(share: float | None, rank: int, part: float) -> tuple[float | None, int, int]:
        return share, rank, whole_slack(shape, rank, max(1, round(part * rank)), dtype)

    ranks = [min(nearest_rank(shape, share), full - block) for share in SHARES]
    limit, fewer = (1 - MIN_SAVING) * dense_parameters(shape), range(full - block, 0, -block)
    saving = (sized(None, rank, statistics.median(slacks)) for rank in fewer)
    largest = next(size for size in saving if aligned_parameters(shape, *size[1:]) <= limit)
    return [*map(sized, SHARES, ranks, slacks), largest]


def builders(shape: Shape, rank: int, slack: int, dtype: torch.dtype, device: str) -> list[Callable[[], nn.Module]]:
    """Returns, for each of FORMS, what builds a layer with random weights."""
    aligned = functools.partial(GaugeAlignedLinear, shape, rank, bias=False, device=device, dtype=dtype)
    plain, paper, ours = (functools.partial(aligned, aligned=rank - columns) for columns in (rank, 0, slack))
    order = torch.randperm(shape[0], device=device)
    return [plain, paper, functools.partial(PivotedLinear, shape[1], rank, order, dtype=dtype), ours]


def _over_first(runs: Sequence[Callable[[int], None]]) -> list[float]:
    """Returns the first run's median seconds for one call, and each other run's time over it."""
    (first,) = interleave([functools.partial(runs[0], 1)], 3)
    once = statistics.median(first)
    calls = max(1, round(LEAST_SECONDS / once))
    repeats = FEW_REPEATS if once > SLOW else REPEATS
    base, *others = interleave([functools.partial(run, calls) for run in runs], repeats, warmup=1)
    return [statistics.median(base) / calls, *(median_ratio(seconds, base) for seconds in others)]


def _grouped(cells: Iterable[Row], *keys: str) -> list[tuple[Any, list[Row]]]:
    """Groups consecutive cells that agree in these keys."""
    return [(values, list(group)) for values, group in itertools.groupby(cells, operator.itemgetter(*keys))]


def _where(row: Row) -> str:
    return f"{row['shape'][0]} × {row['shape'][1]}, {row['tokens']} tokens"


def _time_tables(cells: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns, for each device and dtype, time and operations over dense, by shape, tokens and form."""
    tables = []
    for kind, of_kind in _grouped(cells, "device", "dtype"):
        rows = []
        for _, of in _grouped(of_kind, "shape", "tokens"):
            rows += [[f"{_where(of[0])}: {name}", *(c["ratios"][form] for c in of)] for form, name in FORMS.items()]
            rows.append([f"{_where(of[0])}: operations of ours", *(c["counted"]["ours"] for c in of)])
        title = f"time over a dense layer's, at whole blocks nearest to shares of the full rank: {', '.join(kind)}"
        tables.append(table(title, ["form", *SHARES], rows, digits=2))
    return tables


def _saving_table(cells: Sequence[Row]) -> dict[str, Any]:
    rows = [
        [f"{device}, {dtype}, {shape[0]} × {shape[1]}", of[0]["rank"], of[0]["slack"], of[0]["counted"]["ours"],
         *(cell["ratios"]["ours"] for cell in of)]
        for (device, dtype, shape), of in _grouped(cells, "device", "dtype", "shape")
    ]  # fmt: skip
    columns = ["layer", "rank", "slack", "operations", *(f"{tokens} tokens" for tokens in TOKENS)]
    largest = f"the largest rank of whole blocks that saves {MIN_SAVING:g} of the operations, slack counted"
    return table(f"time over dense at {largest}", columns, rows, digits=2)


def _error_table(summaries: Mapping[str, Any], slacks: Mapping[str, list[float]], model: str) -> dict[str, Any]:
    rows = []
    for dtype, form in itertools.product(summaries, FORMS):
        one = summaries[dtype][form]
        slack = statistics.median(slacks[dtype]) if form == "ours" else None
        numbers = (_finite(one[key]) for key in ("median", "median_times", "worst_times"))
        rows.append([f"{dtype}: {FORMS[form]}", *numbers, one["within"] / one["ranks"], slack, one["condition"]])
    columns = ["median error", "over low-rank's, median", "worst", "within our bound", "slack / rank", "condition"]
    title = f"relative output error at {one['ranks']} ranks of {model}'s layers, on activations unseen (–: overflow)"
    return table(title, ["form", *columns], rows, digits=(4, 2, 2, 3, 3, 1))


def _cost_claims(cells: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the paper's claims on cost, for each device and dtype, on wide layers at many tokens if there are any."""
    claims = []
    for kind, of_kind in _grouped(cells, "device", "dtype"):
        wide = [cell for cell in of_kind if min(cell["shape"]) >= WIDE and cell["tokens"] >= MANY] or of_kind
        last, where = [cell for cell in wide if cell["share"] == SHARES[-1]], f"({', '.join(kind)})"
        plain = [cell["ratios"]["plain"] for cell in last]
        doubled = [cell["ratios"]["plain"] / cell["counted"]["plain"] for cell in last]
        over = [cell["ratios"][form] / cell["counted"][form] for cell in wide for form in ("plain", "paper")]
        worst = max(wide, key=lambda cell: cell["ratios"]["paper"])
        most = worst["ratios"]["paper"]
        claims += [
            claim(f"low-rank U Vᵀ costs up to 2× a dense layer {where}", "up to 2",
                  f"{min(plain):.2f} to {max(plain):.2f} at {SHARES[-1]:g} of the full rank",
                  max(abs(ratio - 1) for ratio in doubled) <= CLOSE, "not known"),
            claim(f"GAR always costs less than a dense layer, even at almost full rank {where}", "always below 1",
                  f"at most {most:.2f} ({_where(worst)}, {worst['share']:g})", most < 1, "not known"),
            claim(f"the cost closely follows the theory, here within {CLOSE:.0%} {where}", "closely",
                  f"measured over counted, low-rank and GAR: {min(over):.2f} to {max(over):.2f}",
                  max(abs(ratio - 1) for ratio in over) <= CLOSE, "not known"),
        ]  # fmt: skip
    return claims


def _error_claim(dtype: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    own = summary["paper"]
    here = "; ".join(
        f"{FORMS[form]} worst ×{one['worst_times']:.3g}, median ×{one['median_times']:.3g}"
        for form, one in summary.items()
        if form != "plain"
    )
    why = f"equal only in exact arithmetic; within our stated bound at {own['within']} of {own['ranks']} ranks"
    what = f"eq. 7 changes no output ({dtype} error over low-rank U Vᵀ's)"
    return claim(what, "equal", here, own["within"] == own["ranks"], why)


def _bound_goal(dtype: str, summary: Mapping[str, Any], model: str) -> dict[str, Any]:
    ours, floor = summary["ours"], alignment.ERROR_FLOOR[getattr(torch, dtype)]
    here = f"worst {ours['worst_times']:.3g}; {ours['within']} of {ours['ranks']} within"
    what = f"{dtype} error with slack over low-rank U Vᵀ's, at {ours['ranks']} ranks of {model}'s layers"
    most = f"at most {alignment.STATED_MULTIPLE:g}" + (f", or {floor:g} in all" if floor else "")
    return goal(what, most, here, ours["within"] == ours["ranks"])


def _saving_goal(cells: Sequence[Row]) -> dict[str, Any]:
    worst = max(cells, key=lambda cell: cell["ratios"]["ours"])
    within = sum(cell["ratios"]["ours"] <= OVER_DENSE for cell in cells)
    where = f"{worst['device']}, {worst['dtype']}, {_where(worst)}"
    here = f"worst {worst['ratios']['ours']:.2f} ({where}); {within} of {len(cells)} within"
    dtypes = " and ".join(dict.fromkeys(cell["dtype"] for cell in cells))
    what = f"a layer that saves at least {MIN_SAVING:g} of its operations, over dense, in {dtypes}"
    return goal(what, f"at most {OVER_DENSE}", here, within == len(cells))


def draw(data: Mapping[str, Any]) -> Any:
    """Draws time over dense by share of the rank at the most tokens, operations dashed: a panel per shape and dtype."""
    most = max(cell["tokens"] for cell in data["cells"])
    shown = _grouped((cell for cell in data["cells"] if cell["tokens"] == most), "device", "dtype", "shape")
    shapes = len({tuple(cell["shape"]) for cell in data["cells"]})
    figure, places = panels(shapes, (3 * shapes, 2.8 * len(shown) / shapes), rows=len(shown) // shapes)
    for axes, ((device, dtype, (m, n)), cells) in zip(places, shown, strict=True):
        shares = [cell["share"] for cell in cells]
        draw_level(axes, 1, linestyle="-")
        for form, name in FORMS.items():
            ratios, counted = ([cell[key][form] for cell in cells] for key in ("ratios", "counted"))
            axes.plot(shares, ratios, color=COLOURS[form], marker="o", markersize=3, label=name)
            axes.plot(shares, counted, color=COLOURS[form], linestyle="--", linewidth=1)
        axes.set_title(f"{m} × {n}, {device}, {dtype}", loc="left", fontsize=9)
        axes.set_ylim(0, 2.2)
    places[0].legend(fontsize=7, loc="upper left")
    figure.supylabel(f"time over dense, {most} tokens", fontsize=9)
    figure.supxlabel("share of the full rank", fontsize=9)
    return figure


EXPERIMENT = Experiment(
    name="gar", title="What gauge alignment saves, and what it costs in accuracy",
    shows="one layer's forward time in four forms against a dense layer and the operations counted, errors by dtype,"
    " and the time of layers that save a quarter of their operations",
    paper="plain costs up to 2× dense, GAR always less than dense, close to theory (Training and inference efficiency)",
    minutes=10, run=run, draw=draw, settings=lambda full: pycode_settings(),
)  # fmt: skip
