"""Which layers keep their ranks: heatmaps of the kept rank by layer and module (FlexRank, Fig. 5)."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flexrank.calibrate import collect_moments
from flexrank.data.metrics import spearman
from flexrank.errors import FlexrankError
from flexrank.nn.linalg import leading_count
from flexrank.nn.matrix import weight_matrix
from flexrank.run.tables import ordered_layers, split_block
from research.findings import Result, claim, table
from research.studies.language import LanguageBench, pycode_settings
from research.studies.study import Request, Study

#: Of the modules that write into the residual stream after attention, the names that architectures give them.
ATTENTION_OUTPUTS = ("o_proj", "attn.c_proj", "out_proj", "attention.output.dense", "self_attention.dense", "out_lin")

#: The share of energy that tells how concentrated what a layer reads and writes is.
ENERGY = 0.99


def run(request: Request) -> Result:
    """Runs the study.

    Raises:
        FlexrankError: several seeds are asked for: nothing in it is drawn by chance.
    """
    if request.seeds not in (None, 1):
        raise FlexrankError(f"--seeds is {request.seeds}; nothing in lm-profiles is drawn by chance, leave it out")
    bench = LanguageBench(request)
    dense = bench.chain.entries[-1].profile
    layers = ordered_layers(dense)
    shares = [[profile[name] / dense[name] for name in layers] for profile in bench.profiles]
    written, read = _concentration(bench, layers)
    tables = [
        _table(f"Share of its ranks that a module keeps: {bench.config.name}", layers, bench.budgets, shares),
        _table(
            f"Share of its directions that holds {ENERGY:.0%} of the energy, over the calibration's tokens",
            layers, ("of its output, in its rank", "of its input, in its width"), (written, read),
        ),
    ]  # fmt: skip
    return {
        "settings": bench.facts() | {"predicted_error": [bench.chain.entry_at(b).error for b in bench.budgets]},
        "tables": tables,
        "claims": _claims(layers, bench.budgets, shares, written, read),
        "data": {"layers": layers, "budgets": bench.budgets, "shares": shares},
    }


@torch.no_grad()
def _concentration(bench: LanguageBench, layers: Sequence[str]) -> tuple[list[float], list[float]]:
    """For each layer how many leading components hold `ENERGY` of its output's, over its rank; and of its input's."""
    chosen = {name: bench.base.get_submodule(name) for name in layers}
    moments = collect_moments(bench.base, bench.space.samples.calibration, chosen, side="input")
    written: list[float] = []
    read: list[float] = []
    for name, layer in chosen.items():
        weight, moment = weight_matrix(layer).double(), moments[name].moment
        for found, gram, width in (
            (written, weight @ moment @ weight.T, min(weight.shape)), (read, moment, len(moment)),
        ):  # fmt: skip
            energies = torch.linalg.eigvalsh(gram).flip(0).clamp(min=0)
            found.append(leading_count(energies, ENERGY) / width)
    return written, read


def _by_module(layers: Sequence[str], values: Sequence[float]) -> dict[str, list[float]]:
    modules: dict[str, list[float]] = {}
    for name, value in zip(layers, values, strict=True):
        modules.setdefault(split_block(name)[1], []).append(value)
    return modules


def _table(title: str, layers: Sequence[str], columns: Sequence[Any], found: Sequence[Sequence[float]]) -> Any:
    """A row a module, a column each of `found`, which holds a value a layer."""
    by_module = [_by_module(layers, values) for values in found]
    rows = []
    for module in by_module[0]:
        each = (column[module] for column in by_module)
        rows.append([module, *(f"{statistics.fmean(one):.2f} ({min(one):.2f}–{max(one):.2f})" for one in each)])
    named = [column if isinstance(column, str) else f"{column:g}" for column in columns]
    return table(f"{title}; mean over blocks (least–most)", ["module", *named], rows)


def _claims(
    layers: list[str], budgets: list[float], shares: list[list[float]], written: list[float], read: list[float]
) -> list[dict[str, Any]]:
    middle = min(range(len(budgets)), key=lambda index: abs(budgets[index] - 0.4))
    kept, budget = shares[middle], f"{budgets[middle]:g}"
    told = f"at {budget} layers keep {min(kept):.2f} to {max(kept):.2f} of their ranks"
    alike = "components are not truncated alike: some keep twice the share of others"
    claims = [claim(alike, "visible in the heatmaps", told, max(kept) > 2 * min(kept))]
    modules = _by_module(layers, kept)
    outputs = next((module for module in modules if module.endswith(ATTENTION_OUTPUTS)), None)
    if outputs is None:
        return claims
    own = statistics.fmean(_central(modules[outputs]))
    others = {module: statistics.fmean(values) for module, values in modules.items() if module != outputs}
    most = max(others, key=lambda module: others[module])
    holds = own >= others[most]
    told = f"at {budget} they keep {own:.2f} of their ranks, {most} {others[most]:.2f}"
    what = "the output projections of the central attention layers keep the most"
    why = "" if holds else _reason(layers, kept, written, read, (outputs, most))
    return [*claims, claim(what, "GPT-2, at .4", told, holds, why)]


def _central(by_block: list[float]) -> list[float]:
    """Without the first and the last third of the blocks."""
    third = len(by_block) // 3
    return by_block[third : len(by_block) - third]


def _reason(
    layers: list[str], kept: list[float], written: list[float], read: list[float], pair: tuple[str, str]
) -> str:
    """What sets the outputs' module apart from the one that keeps most, and whether that tells the other layers too."""
    energetic, inputs = _by_module(layers, written), _by_module(layers, read)
    found = _central(energetic[pair[0]]), energetic[pair[1]], _central(inputs[pair[0]])
    own, most, width = map(statistics.fmean, found)
    told = (
        f"{ENERGY:.0%} of the energy of what they write lies in {own:.2f} of their rank, of {pair[1]}'s in {most:.2f}"
        f" (of what they read, in {width:.2f} of its width)"
    )
    if len(set(written)) == 1:
        return told
    rho = spearman(kept, written)
    return f"{told}; over all {len(layers)} layers the ranks kept go with this share, Spearman ρ {rho:.2f}"


def draw(data: Mapping[str, Any]) -> Any:
    """One heatmap a budget: modules down, blocks across, the share of ranks kept as the colour."""
    from matplotlib.figure import Figure

    layers, budgets = data["layers"], data["budgets"]
    modules = list(dict.fromkeys(split_block(name)[1] for name in layers))
    blocks = list(dict.fromkeys(split_block(name)[0] for name in layers))
    width = 1.2 + len(budgets) * max(1.4, 0.28 * len(blocks))
    figure = Figure(figsize=(width, 0.9 + 0.27 * len(modules)), layout="constrained")
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for axes, budget, kept in zip(panels, budgets, data["shares"], strict=True):
        grid = [[float("nan")] * len(blocks) for _ in modules]
        for name, share in zip(layers, kept, strict=True):
            block, module = split_block(name)
            grid[modules.index(module)][blocks.index(block)] = share
        image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        axes.set(title=f"{budget:g}", xlabel="block", xticks=range(0, len(blocks), max(1, len(blocks) // 6)))
        axes.spines[:].set_visible(False)
    panels[0].set_yticks(range(len(modules)), modules)
    figure.colorbar(image, ax=list(panels), label="share of ranks kept", aspect=14)
    return figure


STUDY = Study(
    name="lm-profiles",
    title="Kept rank by layer and module",
    shows="heatmaps of the share of ranks that each layer keeps at .8, .6, .4 and .2",
    paper="not uniform; on GPT-2 the c_proj of central attention layers is truncated last (Fig. 5)",
    minutes=3,
    run=run,
    draw=draw,
    takes_model=True,
    settings=lambda full: pycode_settings(probe={"levels": 10 if full else 8}),
    full_minutes=5,
)
