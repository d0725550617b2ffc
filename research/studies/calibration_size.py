"""How many samples DataSVD needs (FlexRank, Fig. 6a)."""

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexrank.calibrate import Moments, collect_moments
from flexrank.data.batches import Batch
from flexrank.decompose import decompose_
from flexrank.errors import FlexrankError
from flexrank.nn.select import select_layers
from flexrank.nn.switch import uniform_profile, use_profile
from flexrank.run.workspace import Workspace
from research.findings import Result, between, claim, spread, table
from research.findings.figures import draw_seeds
from research.moments import merge_moments
from research.studies.language import DECOMPOSED, checked_datasvd, load_space, pycode_settings, told_apart
from research.studies.study import Ledger, Request, Study, count_seeds

SIZES = tuple(2**power for power in range(3, 12))
PLATEAU = 128


def run(request: Request) -> Result:
    """Runs the study: uniform ranks, so that the decomposition alone is measured. A seed draws the samples."""
    config, seeds = checked_datasvd(request), count_seeds(request, 3, 5)
    space = load_space(request)
    batches: Any = space.samples.training
    pool = torch.cat([batch["input_ids"] for batch in batches])
    sizes = [size for size in SIZES if size <= len(pool)]
    if not sizes:
        raise FlexrankError(f"data.training: {len(pool)} samples are fewer than the smallest calibration, {SIZES[0]}")
    budgets = list(config.allocation.budgets)
    ledger = Ledger(request.work, told_apart(config, DECOMPOSED) | {"sizes": sizes, "budgets": budgets})
    dense = ledger.take("dense", lambda: space.judge(space.base)["nats_per_token"])
    found = [
        ledger.take(f"seed {seed}", functools.partial(_one_seed, space, pool, sizes, budgets, seed))
        for seed in range(seeds)
    ]
    rows = [
        [f"{size}", *map(spread, zip(*(one[place] for one in found), strict=True))] for place, size in enumerate(sizes)
    ]
    tokens = config.data.max_tokens
    title = f"Held-out nats per token by calibration samples of {tokens} tokens: {config.name} (original {dense:.3f})"
    return {
        "settings": {"model": config.name, "tokens_a_sample": tokens, "seeds": seeds, "pool": len(pool)},
        "tables": [table(title, ["samples", *(f"{budget:g}" for budget in budgets)], rows, digits=4)],
        "claims": _claims(sizes, budgets, found),
        "data": {"sizes": sizes, "budgets": budgets, "found": found, "dense": dense},
    }


def _one_seed(
    space: Workspace, pool: Tensor, sizes: Sequence[int], budgets: Sequence[float], seed: int
) -> list[list[float]]:
    """Nats per token by size and budget. The samples of a size are the first of those of the next."""
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    layers = select_layers(space.base, space.config.layers.include, space.config.layers.exclude)
    moments: Moments | None = None
    found = []
    for start, end in zip((0, *sizes), sizes, strict=False):
        rows = pool[order[start:end]].split(space.config.data.batch_size)
        batches: list[Batch] = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in rows]
        more = collect_moments(space.base, batches, layers)
        moments = more if moments is None else merge_moments(moments, more)
        found.append(_nats(space, moments, budgets))
    return found


def _nats(space: Workspace, moments: Moments, budgets: Sequence[float]) -> list[float]:
    model = copy.deepcopy(space.base)
    decompose_(model, moments)
    found = []
    for budget in budgets:
        with use_profile(model, uniform_profile(model, budget)):
            found.append(space.judge(model)["nats_per_token"])
    return found


def _claims(
    sizes: Sequence[int], budgets: Sequence[float], found: Sequence[Sequence[Sequence[float]]]
) -> list[dict[str, Any]]:
    if PLATEAU not in sizes or sizes[-1] <= PLATEAU:
        return []

    at, told, flat = sizes.index(PLATEAU), [], []
    for place, budget in enumerate(budgets):
        gains = [one[at][place] / one[-1][place] - 1 for one in found]
        first = [one[0][place] / one[-1][place] - 1 for one in found]
        told.append(f"{budget:g} {between(gains)} (from {sizes[0]}: {between(first)})")
        flat.append(max(gains) <= 0.01)
    return [
        claim(
            f"beyond {PLATEAU} samples the loss falls by at most 1 %, every seed", "no visible gain from 128",
            f"loss of {PLATEAU} samples over that of {sizes[-1]}: {', '.join(told)}", all(flat),
            "" if all(flat) else "not found out",
        )
    ]  # fmt: skip


def draw(data: Mapping[str, Any]) -> Any:
    """Nats per token against the number of samples, a line and a band for each budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    sizes = data["sizes"]
    colours = itertools.cycle(("#0072b2", "#009e73", "#d55e00", "#cc79a7"))
    for place, (budget, colour) in enumerate(zip(data["budgets"], colours, strict=False)):
        runs = [[one[size][place] for size in range(len(sizes))] for one in data["found"]]
        draw_seeds(axes, sizes, runs, colour, f"budget {budget:g}")
    axes.axhline(data["dense"], color="#888888", linewidth=1, linestyle=":", label="original")
    axes.axvline(PLATEAU, color="#bbbbbb", linewidth=1)
    axes.annotate("paper: flat from here", (PLATEAU, 1), (3, -8), xycoords=("data", "axes fraction"),
                  textcoords="offset points", color="#666666", fontsize=8)  # fmt: skip
    axes.set(xscale="log", xlabel="calibration samples", ylabel="held-out nats per token")
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    return figure


def _settings(full: bool) -> dict[str, Any]:
    return pycode_settings(
        data={"max_tokens": 512 if full else 256, "training": 4096, "evaluation": 64},
        allocation={"budgets": [0.8, 0.6, 0.4]},
    )


STUDY = Study(
    name="calibration-size",
    title="Quality of DataSVD against the number of calibration samples",
    shows="held-out loss after DataSVD with 8 to 2048 calibration samples, uniform ranks",
    paper="no visible gain beyond 128 samples (Fig. 6a)",
    minutes=8,
    full_minutes=40,
    run=run,
    draw=draw,
    takes_model=True,
    settings=_settings,
)
