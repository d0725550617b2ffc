"""The pictures of docs/concepts: `python docs/site/pictures.py` draws them anew, into docs/pictures.

Figures are computed by flexrank itself, on random layers of a fixed seed; those of consolidation are of
`python -m research language`.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.patches import Rectangle
from torch import Tensor

import flexrank as fr
from flexrank.nn.alignment import alignment_error
from flexrank.nn.linalg import Factors, data_svd, half_shrunk, plain_svd
from flexrank.profiles import Footprint
from flexrank.profiles.costs import aligned_parameters

PLACE = Path(__file__).parents[1] / "pictures"
RESULTS = PLACE.parents[1] / "results"
#: Of `python -m research language`.
SIZES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
BLUES = ("#08306b", "#2171b5", "#6baed6", "#c6dbef")
ORANGE, GREY = "#d95f0e", "#777777"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "flexrank"}


def main() -> None:
    """Draws all pictures."""
    PLACE.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for draw in (draw_factors, draw_ranks, draw_consolidation, draw_gauge):
            torch.manual_seed(0)
            figure = draw()
            name = draw.__name__.removeprefix("draw_")
            figure.savefig(PLACE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
            pyplot.close(figure)


def draw_factors() -> Any:
    """Prefixes of two factors, and what three decompositions lose by rank."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), width_ratios=[1, 1.1])
    _draw_prefixes(left)
    _draw_errors(right)
    return figure


def _draw_prefixes(axes: Any) -> None:
    for rank, colour in zip((8, 6, 4, 2), reversed(BLUES), strict=True):
        axes.add_patch(Rectangle((0, 0), rank, 10, facecolor=colour, edgecolor="white"))
        axes.add_patch(Rectangle((10, 10 - rank), 12, rank, facecolor=colour, edgecolor="white"))
        axes.text(rank - 0.25, 0.4, f"r = {rank}", rotation=90, ha="right", fontsize=7, color=_ink(colour))
    axes.text(4, 10.5, "U  (m × k)", ha="center")
    axes.text(16, 10.5, "Vᵀ  (k × n)", ha="center")
    axes.set(xlim=(-0.5, 22.5), ylim=(-0.5, 11.5), aspect="equal", title="one pair of factors holds every size")
    axes.axis("off")


def _ink(colour: str) -> str:
    return "black" if colour in BLUES[2:] else "white"


def _draw_errors(axes: Any) -> None:
    """The loss ½ gᵀ(W − W_r)x to second order, E‖G^{1/2}(W − W_r)x‖², over that of W, of one random layer."""
    size, share = 64, torch.linspace(0, 1, 64).double()
    weight = torch.randn(size, size).double()
    inputs, gradients = (_moment(10.0 ** (-power * share)) for power in (2.0, 1.5))
    methods = {
        "SVD: weights alone": plain_svd(weight),
        "DataSVD: inputs": data_svd(weight, input_moment=inputs),
        "fisher: inputs and gradients": data_svd(weight, input_moment=inputs, gradient_moment=half_shrunk(gradients)),
    }
    for (name, factors), colour in zip(methods.items(), (GREY, BLUES[1], ORANGE), strict=True):
        errors = [_loss(weight, factors, rank, inputs, gradients) for rank in range(1, size)]
        axes.semilogy(range(1, size), errors, label=name, color=colour)
    axes.set(xlabel="rank", title="loss to second order, relative", ylim=(1e-4, 1))
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _moment(spectrum: Tensor) -> Tensor:
    basis = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum)).double())[0]
    return basis * spectrum @ basis.T


def _loss(weight: Tensor, factors: Factors, rank: int, inputs: Tensor, gradients: Tensor) -> float:
    lost = weight - factors.u[:rank].T @ factors.v[:rank]
    return float((gradients @ lost @ inputs @ lost.T).trace() / (gradients @ weight @ inputs @ weight.T).trace())


def draw_ranks() -> Any:
    """The nested profiles that are allocated to six layers of unlike sensitivity."""
    budgets, layers = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], [f"layer {index}" for index in range(1, 7)]
    levels, shape = tuple(range(8, 129, 8)), (128, 128)
    scales = (4.0, 1.0, 0.25, 0.25, 1.0, 8.0)
    errors = {
        name: tuple(scale * (1 - r / 128) ** 3 for r in levels) for name, scale in zip(layers, scales, strict=True)
    }
    table = fr.SensitivityTable(
        shapes=dict.fromkeys(layers, shape), ranks=dict.fromkeys(layers, levels), errors=errors, baseline=0.0,
        footprint=Footprint(0, 0, 4),
    )  # fmt: skip
    chain = fr.allocate_ranks(table, budgets)
    shares = np.array([[chain.at(budget)[name] / 128 for name in layers] for budget in budgets])
    figure, axes = pyplot.subplots(figsize=(5.5, 3))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower")
    for row, column in np.ndindex(shares.shape):
        text = "full" if shares[row, column] == 1 else f"{128 * shares[row, column]:.0f}"
        axes.text(column, row, text, ha="center", va="center", color="white" if shares[row, column] > 0.6 else "black")
    axes.set_xticks(range(len(layers)), [f"{name}\n(× {scale:g})" for name, scale in zip(layers, scales, strict=True)])
    axes.set_yticks(range(len(budgets)), map(str, budgets))
    axes.set(ylabel="budget", title="rank of each layer; its sensitivity in brackets")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, label="share of the full rank")
    return figure


def draw_consolidation() -> Any:
    """The components that a step trains, and what all sizes of one language model lose before and after training."""
    figure, (steps, losses) = pyplot.subplots(1, 2, figsize=(9, 3), width_ratios=[1, 1.1])
    drawn = (6, 2, 8, 4, 8)
    for step, rank in enumerate(drawn):
        for component in range(8):
            colour = BLUES[1] if component < rank else "white"
            steps.add_patch(Rectangle((component, -step), 0.9, 0.8, facecolor=colour, edgecolor=GREY))
        steps.text(8.3, 0.4 - step, f"r = {rank}", va="center", fontsize=8)
        steps.text(-0.4, 0.4 - step, f"step {step + 1}", va="center", ha="right", fontsize=8)
    steps.set(xlim=(-2.5, 10), ylim=(0.5 - len(drawn), 1), title="each step trains the prefix of one size")
    steps.axis("off")
    data = json.loads((RESULTS / "language" / "result.json").read_text(encoding="utf8"))["data"]["pycode5m"]
    for name, (method, colour) in {"before": ("fisher, joint", GREY), "after": ("consolidated", ORANGE)}.items():
        seeds = np.array([[one["nats"] for one in seed] for seed in data["results"][method]])
        above = np.maximum(seeds.mean(0) - data["dense"]["nats"], 1e-4)  # at .9 nothing is lost
        losses.semilogy(SIZES, above, "o-", ms=3, color=colour, label=name)
    losses.set(xlabel="budget", title="pycode5m: nats per token above the base model")
    losses.legend(frameon=False, fontsize=8)
    return figure


def draw_gauge() -> Any:
    """The aligned form as blocks, its parameters by rank, and its error in bfloat16 by slack."""
    figure, (blocks, costs, errors) = pyplot.subplots(1, 3, figsize=(10, 3), width_ratios=[1.1, 1, 1])
    figure.subplots_adjust(wspace=0.35)
    _draw_blocks(blocks)
    _draw_parameters(costs)
    _draw_slack(errors)
    return figure


def _draw_blocks(axes: Any) -> None:
    for corner, width, height, colour, text in (
        ((0, 5), 4, 4, "white", "I"), ((4, 5), 2, 4, "white", "0"), ((0, 0), 6, 5, BLUES[2], "Û"),
        ((8, 3), 9, 6, BLUES[2], "Ṽᵀ"),
    ):  # fmt: skip
        axes.add_patch(Rectangle(corner, width, height, facecolor=colour, edgecolor=GREY))
        axes.text(corner[0] + width / 2, corner[1] + height / 2, text, ha="center", va="center", fontsize=11)
    for x, y, text in ((2, 9.4, "g = r−p"), (5, 9.4, "p"), (12.5, 9.4, "n")):
        axes.text(x, y, text, ha="center", fontsize=8)
    for x, y, text in ((-0.3, 7, "g"), (-0.3, 2.5, "m−g"), (18, 6, "r")):
        axes.text(x, y, text, ha="right", va="center", fontsize=8)
    axes.set(xlim=(-2.5, 18), ylim=(-0.5, 10.5), aspect="equal", title="stored: Û and Ṽ, no I and no 0")
    axes.axis("off")


def _draw_parameters(axes: Any) -> None:
    size = 1024
    ranks = np.arange(1, size + 1)
    lines = {
        "dense": (np.ones(size), GREY),
        "U Vᵀ": (2 * ranks / size, BLUES[1]),
        "aligned": (np.array([aligned_parameters((size, size), int(r)) for r in ranks]) / size**2, ORANGE),
    }
    for name, (shares, colour) in lines.items():
        axes.plot(ranks / size, shares, color=colour, label=name)
    axes.set(xlabel="rank over full rank", ylim=(0, 2), title="parameters over dense (m = n)")
    axes.legend(frameon=False)


def _draw_slack(axes: Any) -> None:
    rank, slacks = 128, (0, 1, 2, 4, 8, 16, 32, 64, 128)
    u, v, inputs = torch.randn(256, rank), torch.randn(256, rank), torch.randn(64, 256)
    errors = [alignment_error(u.double(), v.double(), slack, inputs, torch.bfloat16) for slack in slacks]
    places = range(len(slacks))
    axes.semilogy(places, errors, "o-", color=ORANGE)
    axes.axhline(3 * errors[-1], color=GREY, linestyle="--")
    axes.text(len(slacks) - 1, 3.3 * errors[-1], "stated bound", color=GREY, ha="right", fontsize=8)
    axes.set_xticks(places, map(str, slacks))
    axes.set(xlabel=f"slack p, of rank {rank}", title="relative error in bfloat16")


if __name__ == "__main__":
    main()
