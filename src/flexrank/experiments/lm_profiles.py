"""Which layers keep their ranks: heatmaps of the kept rank by layer and module (FlexRank, Fig. 5)."""

import statistics
from collections.abc import Mapping
from typing import Any

from flexrank.experiments.language import LanguageBench, pycode_settings
from flexrank.experiments.study import Request, Result, Study, claim, table
from flexrank.report import ordered_layers, split_block

#: Of the modules that write into the residual stream after attention, the names that architectures give them.
ATTENTION_OUTPUTS = ("o_proj", "attn.c_proj", "out_proj", "attention.output.dense", "self_attention.dense", "out_lin")


def run(request: Request) -> Result:
    """Runs the study; nothing in it is drawn by chance but the configuration's seed."""
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
    kept = shares[middle]
    spread = statistics.pstdev(kept)
    claims = [
        claim(
            "components are not truncated uniformly", "visible in the heatmaps",
            f"at {budgets[middle]:g} from {min(kept):.2f} to {max(kept):.2f} of the ranks, standard deviation "
            f"{spread:.2f}", spread > 0.05,
        )
    ]  # fmt: skip
    outputs = [place for place, name in enumerate(layers) if split_block(name)[1].endswith(ATTENTION_OUTPUTS)]
    if outputs:
        central = outputs[len(outputs) // 3 : -(len(outputs) // 3) or None]
        own, all_of_them = statistics.fmean(kept[place] for place in central), statistics.fmean(kept)
        claims.append(
            claim(
                "the output projections of the central attention layers are truncated last", "GPT-2, at .4",
                f"at {budgets[middle]:g} they keep {own:.2f} of their ranks, all layers {all_of_them:.2f}",
                own > all_of_them,
                "" if own > all_of_them else "another model, other layers: the order is the probe's, not the method's",
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
