"""What one layer's forward costs in four forms over its rank, and where the paper's form spends what it takes.

Every figure is a time over that of a dense layer's forward, the two in turn.
"""

import functools
import importlib.util
import itertools
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.nn.gauge_aligned import GaugeAlignedLinear
from flexrank.profiles.costs import aligned_parameters, dense_parameters, measure_ratio, nearest_rank, rank_block
from flexrank.progress import track
from research.baselines.pivoted import PivotedLinear
from research.findings import claim, shown, spread, table
from research.studies.study import Ledger

FORMS = {"plain": "plain U Vᵀ", "paper": "paper's GAR", "pivoted": "pivoted GAR", "ours": "ours, with slack"}
COLOURS = {"plain": "#0072B2", "paper": "#D55E00", "pivoted": "#E69F00", "ours": "#009E73"}
#: Parts of the paper's form: its two products alone, into memory that stands ready. And the whole at the nearest rank
#: of whole blocks; and compiled.
PARTS = {"first": "x Ṽᵀ alone", "second": "the product with Û alone"}
BLOCKS, COMPILED = "blocks", "compiled"
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
TIMED = ("float32", "bfloat16")
TIMINGS = 5
#: A measured cost that is off the counted one by at most this part follows it closely.
CLOSE = 0.15


def measure_panels(
    ledger: Ledger, width: int, tokens: int, slacks: Mapping[str, list[float]], repeats: int, device: str
) -> list[dict[str, Any]]:
    """For each device and dtype: the forms' costs over a dense layer's at each share, measured and counted."""
    panels = []
    for place, dtype in itertools.product(devices_of(device), TIMED):
        time = functools.partial(_time, width, tokens, place, dtype, slacks[dtype])
        rounds = track(range(repeats), f"timing {dtype} on {place}")
        timed = [ledger.take(f"time {place} {dtype} {number}", time) for number in rounds]
        measured = {
            key: [spread(ratios) for ratios in zip(*(one[key] for one in timed), strict=True)] for key in timed[0]
        }
        at = list(zip(SHARES, slacks[dtype], strict=True))
        counted = {form: [counted_cost(form, width, share, slack) for share, slack in at] for form in FORMS}
        counted |= {"first": [rank_at(share, width) / width for share in SHARES]}
        counted |= {"second": [a - b for a, b in zip(counted["paper"], counted["first"], strict=True)]}
        counted |= {BLOCKS: [counted_cost("paper", width, block_rank_at(share, width) / width, 0) for share in SHARES]}
        panels.append({"device": place, "dtype": dtype, "shares": SHARES, "measured": measured, "counted": counted})
    return panels


def _time(width: int, tokens: int, device: str, dtype: str, slacks: list[float]) -> dict[str, list[float]]:
    """Each form and each of `PARTS` over a dense layer's forward, at each share; the weights are random."""
    precision = getattr(torch, dtype)
    dense = nn.Linear(width, width, bias=False, device=device, dtype=precision)
    x = torch.randn(tokens, width, device=device).to(precision)
    times: dict[str, list[float]] = {key: [] for key in (*FORMS, *PARTS, BLOCKS)}
    for (share, slack_share), form in itertools.product(zip(SHARES, slacks, strict=True), FORMS):
        layer = random_layer(form, width, rank_at(share, width), slack_share, device, precision)
        candidates = {form: layer_forward(layer, x)}
        if isinstance(layer, GaugeAlignedLinear) and form == "paper":
            blocks = random_layer(form, width, block_rank_at(share, width), 0, device, precision)
            candidates |= {key: _waited(product, x) for key, product in _products(layer, x).items()}
            candidates[BLOCKS] = layer_forward(blocks, x)
            if can_compile(device):
                times.setdefault(COMPILED, []).append(_compiled_ratio(layer, dense, x))
        for key, candidate in candidates.items():
            times[key].append(measure_ratio(candidate, layer_forward(dense, x), TIMINGS, warmup=1))
    return times


def _products(layer: GaugeAlignedLinear, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    latent = layer.latent(x)
    # As in the layer, the second product's columns lie in a wider output: another kernel than a whole one's, at times.
    first, second = torch.empty_like(latent), torch.empty_like(x)[:, layer.aligned :]

    def product(rows: Tensor, linear: nn.Module, out: Tensor) -> Callable[[], Tensor]:
        return functools.partial(torch.mm, rows, linear.get_parameter("weight").T, out=out)

    return {"first": product(x, layer.latent, first), "second": product(latent, layer.expand, second)}


def _compiled_ratio(layer: nn.Module, dense: nn.Module, x: Tensor) -> float:
    """The layer's forward over the dense one's, both by torch.compile."""
    torch.compiler.reset()  # graphs of an earlier rank would make this one of any rank
    own, other = torch.compile(layer), torch.compile(dense)
    return measure_ratio(layer_forward(own, x), layer_forward(other, x), TIMINGS, warmup=2)


def can_compile(device: str) -> bool:
    """Whether torch.compile finds what it needs: on a CPU a C++ compiler and Python's headers, on a GPU triton."""
    if device != "cpu":
        return importlib.util.find_spec("triton") is not None
    has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return has_headers and shutil.which(os.environ.get("CXX", "g++")) is not None


def random_layer(form: str, width: int, rank: int, slack_share: float, device: str, dtype: torch.dtype) -> nn.Module:
    """A square layer in one of `FORMS`, its weights random."""
    if form == "pivoted":
        return PivotedLinear(width, rank, torch.randperm(width, device=device), dtype=dtype)
    aligned = rank - _slack(form, rank, slack_share)
    return GaugeAlignedLinear((width, width), rank, aligned, bias=False, device=device, dtype=dtype)


def layer_forward(layer: Callable[[Tensor], object], x: Tensor) -> Callable[[], object]:
    """A call of the layer that returns when the work is done."""
    return _waited(lambda: layer(x), x)


def _waited(work: Callable[[], object], x: Tensor) -> Callable[[], object]:
    def call() -> None:
        work()
        if x.is_cuda:
            torch.cuda.synchronize()  # the call returns before the work is done

    return call


def counted_cost(form: str, width: int, share: float, slack_share: float) -> float:
    """Multiply-adds over a dense layer's: r(m+n−r+p)/mn, where plain U Vᵀ has p = r, and the paper's form p = 0."""
    shape, rank = (width, width), rank_at(share, width)
    return aligned_parameters(shape, rank, _slack(form, rank, slack_share)) / dense_parameters(shape)


def _slack(form: str, rank: int, slack_share: float) -> int:
    return {"plain": rank, "paper": 0, "pivoted": 0, "ours": round(slack_share * rank)}[form]


def rank_at(share: float, full: int) -> int:
    """At least 1, and not full, where nothing would be left to align."""
    return max(1, min(round(share * full), full - 1))


def block_rank_at(share: float, full: int) -> int:
    """As `rank_at`, of whole blocks."""
    shape = (full, full)
    return min(nearest_rank(shape, share), full - rank_block(shape))


def devices_of(wanted: str) -> list[str]:
    """What is timed: the device that the configuration names, or with `auto` this CPU, and a GPU where there is one."""
    if wanted != "auto":
        return [wanted]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def cost_tables(panels: list[dict[str, Any]], setting: str) -> list[dict[str, Any]]:
    """The forms' costs; and the parts of the paper's."""
    columns = ["form", *(f"{share:g}" for share in SHARES)]
    forms: list[list[Any]] = []
    parts: list[list[Any]] = []
    for panel in panels:
        where, measured, counted = f"{panel['device']}, {panel['dtype']}", panel["measured"], panel["counted"]
        for rows, names in ((forms, FORMS), (parts, PARTS)):
            for key, name in names.items():
                rows.append([f"{where}: {name}", *measured[key]])
                rows.append(["    operations counted", *counted[key]])
        parts.append([f"{where}: the rest", *_remainder(panel)])
        parts.append([f"{where}: the whole at the nearest rank of whole blocks", *measured[BLOCKS]])
        parts.append(["    operations counted", *counted[BLOCKS]])
        if COMPILED in measured:
            parts.append([f"{where}: the whole, both by torch.compile", *measured[COMPILED]])
    return [
        table(f"forward time over a dense layer's at shares of the full rank: {setting}", columns, forms, digits=2),
        table("where the paper's form spends it, over a dense layer's time", columns, parts, digits=3),
    ]


def _remainder(panel: Mapping[str, Any]) -> list[float]:
    """What the paper's form takes beside its two products: fresh memory for both, and the pass over the output."""
    whole, first, second = (
        [cell["mean"] for cell in panel["measured"][key]] for key in ("paper", "first", "second")
    )  # fmt: skip
    return [a - b - c for a, b, c in zip(whole, first, second, strict=True)]


def cost_claims(panel: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the paper says of the cost, beside a panel's."""
    where, last = f"{panel['device']}, {panel['dtype']}", f"{SHARES[-1]:g} of the full rank"
    top = {form: shown(panel["measured"][form][-1], 2) for form in FORMS}
    worst = max(cell["mean"] for cell in panel["measured"]["paper"])
    ranges = {form: _over_counted(panel, form) for form in FORMS}
    is_double = abs(ranges["plain"][-1] - 1) <= CLOSE
    follows = all(abs(ratio - 1) <= CLOSE for form in ("plain", "paper") for ratio in ranges[form])
    told = ", ".join(f"{FORMS[form]} {min(found):.2f} to {max(found):.2f}" for form, found in ranges.items())
    farthest = max(range(len(SHARES)), key=lambda place: abs(ranges["paper"][place] - 1))
    found = (
        (f"plain U Vᵀ costs up to 2× a dense layer ({where})", "up to 2",
         f"{top['plain']} at {last} (counted {panel['counted']['plain'][-1]:.2f})", is_double, "not found out"),
        (f"GAR always costs less than a dense layer, even at almost full rank ({where})", "always below 1",
         f"{top['paper']} at {last} (counted {panel['counted']['paper'][-1]:.3f}); pivoted {top['pivoted']}, "
         f"ours {top['ours']}", worst < 1, _reason(panel, len(SHARES) - 1)),
        (f"the cost closely follows the theory, here within {CLOSE:.0%} ({where})", "closely",
         f"measured over counted: {told}", follows, _reason(panel, farthest)),
    )  # fmt: skip
    return [claim(what, paper, here, holds, "" if holds else why) for what, paper, here, holds, why in found]


def _over_counted(panel: Mapping[str, Any], form: str) -> list[float]:
    pairs = zip(panel["measured"][form], panel["counted"][form], strict=True)
    return [measured["mean"] / counted for measured, counted in pairs]


def _reason(panel: Mapping[str, Any], place: int) -> str:
    """Where the paper's form spends what it takes at one share."""
    measured, counted = ({key: panel[kind][key][place] for key in (*PARTS, BLOCKS)} for kind in ("measured", "counted"))
    products = " and ".join(f"{shown(measured[key], 3)} (counted {counted[key]:.3f})" for key in PARTS)
    told = (
        f"at {SHARES[place]:g} the paper's two products alone take {products}, the rest {_remainder(panel)[place]:.3f};"
        f" the whole at the nearest rank of whole blocks takes {shown(measured[BLOCKS], 2)}"
        f" (counted {counted[BLOCKS]:.2f})"
    )
    if COMPILED not in panel["measured"]:
        return told
    compiled, eager = (shown(panel["measured"][key][place], 2) for key in (COMPILED, "paper"))
    return f"{told}; by torch.compile, as in the paper, {compiled}, eagerly {eager}"


def draw_cost(axes: Any, panel: Mapping[str, Any]) -> None:
    """Cost over rank by form, counted operations dashed."""
    shares = panel["shares"]
    axes.axhline(1, color="#555555", linewidth=0.8)
    for form, name in FORMS.items():
        means, deviations = ([cell[key] for cell in panel["measured"][form]] for key in ("mean", "sd"))
        axes.errorbar(shares, means, deviations, color=COLOURS[form], marker="o", markersize=3.5, capsize=2, label=name)
        axes.plot(shares, panel["counted"][form], color=COLOURS[form], linestyle=(0, (4, 2)), linewidth=1)
    axes.set_title(f"{panel['device']}, {panel['dtype']}; operations dashed", loc="left", fontsize=10)
    axes.set_xlabel("share of the full rank")
    axes.set_ylim(bottom=0)
