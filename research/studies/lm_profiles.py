"""Which layers keep their ranks: heatmaps of the kept rank by layer and module (FlexRank, Fig. 5)."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flexrank.calibrate import collect_moments
from flexrank.data.metrics import spearman
from flexrank.nn.matrix import weight_matrix
from flexrank.run.tables import ordered_layers, split_block
from research.experiment import Experiment, Request
from research.figures import panels
from research.measures import leading_count
from research.result import Result, claim, measured, table
from research.studies.language import LanguageBench, pycode_settings

#: The architectures' names for the modules that write attention's output into the residual stream.
ATTENTION_OUTPUTS = ("o_proj", "attn.c_proj", "out_proj", "attention.output.dense", "self_attention.dense", "out_lin")
#: The share of energy by which the concentration of a layer's output is measured.
ENERGY = 0.99


def run(request: Request) -> Result:
    """Runs the study."""
    bench = LanguageBench(request)
    dense = bench.chain.entries[-1].profile
    layers = ordered_layers(dense)
    shares = [[profile[name] / dense[name] for name in layers] for profile in bench.profiles]
    concentration = _concentration(bench, layers)
    columns = [_by_module(layers, values) for values in (*shares, concentration)]
    middle = min(range(len(bench.budgets)), key=lambda index: abs(bench.budgets[index] - 0.4))
    rows = []
    for module in columns[0]:
        each = (column[module] for column in columns)
        rows.append([module, *(f"{statistics.fmean(one):.2f} ({min(one):.2f}–{max(one):.2f})" for one in each)])
    kept = f"Share of its ranks that a module keeps by budget, and that holds {ENERGY:.0%} of its output's energy"
    title = f"{kept} over the calibration's tokens: {bench.config.name}; mean over blocks (least–most)"
    tables = [table(title, ["module", *bench.budgets, "energy"], rows)]
    claims = _claims(bench.budgets[middle], shares[middle], columns[middle], concentration)
    data = {"layers": layers, "budgets": bench.budgets, "shares": shares}
    errors = [bench.chain.entry_at(budget).error for budget in bench.budgets]
    return measured(bench.facts(predicted_error=errors), tables, claims, data)


@torch.no_grad()
def _concentration(bench: LanguageBench, layers: Sequence[str]) -> list[float]:
    """Returns, for each layer, how many leading components hold `ENERGY` of its output's energy, over its rank."""
    chosen = {name: bench.base.get_submodule(name) for name in layers}
    moments = collect_moments(bench.base, bench.space.samples.calibration, chosen, side="input")
    shares = []
    for name, layer in chosen.items():
        weight = weight_matrix(layer).double()
        energies = torch.linalg.eigvalsh(weight @ moments[name].moment @ weight.T).flip(0).clamp(min=0)
        shares.append(leading_count(energies, ENERGY) / min(weight.shape))
    return shares


def _by_module(layers: Sequence[str], values: Sequence[float]) -> dict[str, list[float]]:
    modules: dict[str, list[float]] = {}
    for name, value in zip(layers, values, strict=True):
        modules.setdefault(split_block(name)[1], []).append(value)
    return modules


def _claims(
    budget: float, shares: Sequence[float], kept: Mapping[str, Sequence[float]], concentration: Sequence[float]
) -> list[dict[str, Any]]:
    here = f"at {budget:g} layers keep {min(shares):.2f} to {max(shares):.2f} of their ranks"
    alike = "components are not truncated alike: some keep twice the share of others"
    claims = [claim(alike, "visible in the heatmaps", here, max(shares) > 2 * min(shares))]
    outputs = next((module for module in kept if module.endswith(ATTENTION_OUTPUTS)), None)
    if outputs is None:
        return claims
    third = len(kept[outputs]) // 3
    own = statistics.fmean(kept[outputs][third : len(kept[outputs]) - third])
    others = {module: statistics.fmean(values) for module, values in kept.items() if module != outputs}
    most = max(others, key=lambda module: others[module])
    why = f"ranks kept go with the share that holds {ENERGY:.0%} of the output's energy, Spearman ρ "
    why += f"{spearman(shares, concentration):.2f} over all {len(shares)} layers"
    what = "the output projections of the central attention layers keep the most"
    here = f"at {budget:g} they keep {own:.2f} of their ranks, {most} {others[most]:.2f}"
    return [*claims, claim(what, "GPT-2, at .4", here, own >= others[most], why)]


def draw(data: Mapping[str, Any]) -> Any:
    """Draws a heatmap for each budget: modules down, blocks across, the share of ranks kept as the colour."""
    budgets, places = data["budgets"], [split_block(name) for name in data["layers"]]
    blocks, modules = (list(dict.fromkeys(part)) for part in zip(*places, strict=True))
    width = 1.2 + len(budgets) * max(1.4, 0.28 * len(blocks))
    figure, all_axes = panels(len(budgets), (width, 0.9 + 0.27 * len(modules)), sharey=True)
    for axes, budget, kept in zip(all_axes, budgets, data["shares"], strict=True):
        grid = [[float("nan")] * len(blocks) for _ in modules]
        for (block, module), share in zip(places, kept, strict=True):
            grid[modules.index(module)][blocks.index(block)] = share
        image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        axes.set(title=f"{budget:g}", xlabel="block", xticks=range(0, len(blocks), max(1, len(blocks) // 6)))
        axes.spines[:].set_visible(False)
    all_axes[0].set_yticks(range(len(modules)), modules)
    figure.colorbar(image, ax=all_axes, label="share of ranks kept", aspect=14)
    return figure


EXPERIMENT = Experiment(
    "lm-profiles", "Kept rank by layer and module",
    "heatmaps of the share of ranks that each layer keeps at .8, .6, .4 and .2", minutes=3, full_minutes=5,
    run=run, draw=draw, settings=lambda full: pycode_settings(probe={"levels": 10 if full else 8}),
    paper="not uniform; on GPT-2 the c_proj of central attention layers is truncated last (Fig. 5)",
)  # fmt: skip
