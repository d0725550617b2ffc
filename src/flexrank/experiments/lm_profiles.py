"""Which layers keep their ranks: heatmaps of the kept rank by layer and module (FlexRank, Fig. 5)."""

import statistics
from collections.abc import Mapping
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.experiments.language import LanguageBench, pycode_settings
from flexrank.experiments.study import Request, Study
from flexrank.findings import Result, claim, table
from flexrank.report import ordered_layers, split_block

#: Of the modules that write into the residual stream after attention, the names that architectures give them.
ATTENTION_OUTPUTS = ("o_proj", "attn.c_proj", "out_proj", "attention.output.dense", "self_attention.dense", "out_lin")


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
    modules = list(dict.fromkeys(split_block(name)[1] for name in layers))
    rows = []
    for module in modules:
        of_module = [place for place, name in enumerate(layers) if split_block(name)[1] == module]
        cells = []
        for kept in shares:
            values = [kept[place] for place in of_module]
            cells.append(f"{statistics.fmean(values):.2f} ({min(values):.2f}–{max(values):.2f})")
        rows.append([module, *cells])
    return {
        "settings": bench.facts() | {"predicted_error": [bench.chain.entry_at(b).error for b in bench.budgets]},
        "tables": [
            table(
                f"Share of its ranks that a module keeps, mean over blocks (least–most): {bench.config.name}",
                ["module", *(f"{budget:g}" for budget in bench.budgets)],
                rows,
            )
        ],
        "claims": _claims(layers, bench.budgets, shares),
        "data": {"layers": layers, "budgets": bench.budgets, "shares": shares},
    }


def _claims(layers: list[str], budgets: list[float], shares: list[list[float]]) -> list[dict[str, Any]]:
    middle = min(range(len(budgets)), key=lambda index: abs(budgets[index] - 0.4))
    kept, budget = shares[middle], f"{budgets[middle]:g}"
    told = f"at {budget} layers keep {min(kept):.2f} to {max(kept):.2f} of their ranks"
    alike = "components are not truncated alike: some keep twice the share of others"
    claims = [claim(alike, "visible in the heatmaps", told, max(kept) > 2 * min(kept))]
    modules: dict[str, list[float]] = {}
    for name, share in zip(layers, kept, strict=True):
        modules.setdefault(split_block(name)[1], []).append(share)
    outputs = next((module for module in modules if module.endswith(ATTENTION_OUTPUTS)), None)
    if outputs is not None:
        third = len(modules[outputs]) // 3
        own = statistics.fmean(modules[outputs][third : len(modules[outputs]) - third])
        others = {module: statistics.fmean(values) for module, values in modules.items() if module != outputs}
        most = max(others, key=lambda module: others[module])
        claims.append(
            claim(
                "the output projections of the central attention layers keep the most", "GPT-2, at .4",
                f"at {budget} they keep {own:.2f} of their ranks, {most} {others[most]:.2f}", own >= others[most],
                "" if own >= others[most] else "not found out",
            )
        )  # fmt: skip
    return claims


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
