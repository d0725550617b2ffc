"""How many calibration samples DataSVD needs (FlexRank, Fig. 6a)."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexrank import FlexrankError, decompose_
from flexrank.calibrate import LayerMoment, Moments, collect_moments
from flexrank.data.text import block_batches
from flexrank.nn.select import select_layers
from flexrank.nn.switch import uniform_profile, use_profile
from flexrank.run.workspace import Workspace
from research.experiment import Experiment, Ledger, Request
from research.figures import GREEN, OTHER, OURS, PINK, draw_level, draw_seeds, panels
from research.result import Result, between, claim, measured, spreads, table
from research.studies.language import DECOMPOSED, checked_config, datasvd_space, identity_of, pycode_settings

SIZES = tuple(2**power for power in range(3, 12))
PLATEAU = 128


def run(request: Request) -> Result:
    """Runs the study at uniform ranks, so only the decomposition is measured. A seed draws the samples."""
    config, space = checked_config(request), datasvd_space(request)
    batches: Any = space.samples.training
    if config.data.is_stream:  # it may have any size
        batches = itertools.islice(batches, -(-SIZES[-1] // config.distillation.batch_size))
    pool = torch.cat([batch["input_ids"] for batch in batches])
    sizes = [size for size in SIZES if size <= len(pool)]
    if not sizes:
        raise FlexrankError(f"data.training: {len(pool)} samples are fewer than the smallest calibration, {SIZES[0]}")
    budgets, tokens = list(config.allocation.budgets), config.data.max_tokens
    ledger = Ledger(request.work, identity_of(config, DECOMPOSED) | {"sizes": sizes, "budgets": budgets})
    dense = ledger.take("dense", lambda: space.measure_quality(space.base)["nats_per_token"])
    runs = ledger.take_seeds("sizes", request.seeds, _one_seed, space, pool, sizes, budgets)
    rows = [[f"{size}", *spreads(one[place] for one in runs)] for place, size in enumerate(sizes)]
    title = f"Held-out nats per token by calibration samples of {tokens} tokens: {config.name} (original {dense:.3f})"
    settings = {"model": config.name, "tokens_a_sample": tokens, "seeds": request.seeds, "pool": len(pool)}
    tables = [table(title, ["samples", *budgets], rows, digits=4)]
    data = {"sizes": sizes, "budgets": budgets, "runs": runs, "dense": dense}
    return measured(settings, tables, _claims(sizes, budgets, runs), data)


def _one_seed(
    space: Workspace, pool: Tensor, sizes: Sequence[int], budgets: Sequence[float], seed: int
) -> list[list[float]]:
    """Returns nats per token by size and budget. Each size's samples are the first of the next size's."""
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    layers = select_layers(space.base, space.config.layers.include, space.config.layers.exclude)
    moments: Moments = {}
    nats: list[list[float]] = []
    for start, end in zip((0, *sizes), sizes, strict=False):
        batches = block_batches(pool[order[start:end]], space.config.data.batch_size)
        more = collect_moments(space.base, batches, layers)
        moments = {name: _added(moments[name], one) if moments else one for name, one in more.items()}
        model = copy.deepcopy(space.base)
        decompose_(model, moments)
        nats.append([])
        for budget in budgets:
            with use_profile(model, uniform_profile(model, budget)):
                nats[-1].append(space.measure_quality(model)["nats_per_token"])
    return nats


def _added(one: LayerMoment, other: LayerMoment) -> LayerMoment:
    """Returns the moment of both sets of samples together."""
    squares, tokens = one.mean_square + other.mean_square, one.tokens + other.tokens
    return LayerMoment(one.side, one.moment + other.moment, squares, tokens)


def _claims(sizes: Sequence[int], budgets: Sequence[float], runs: Any) -> list[dict[str, Any]]:
    if PLATEAU not in sizes or sizes[-1] <= PLATEAU:
        return []
    parts, flat = [], []
    for place, budget in enumerate(budgets):
        gains, first = ([one[at][place] / one[-1][place] - 1 for one in runs] for at in (sizes.index(PLATEAU), 0))
        parts.append(f"{budget:g} {between(gains)} (from {sizes[0]}: {between(first)})")
        flat.append(max(gains) <= 0.01)
    here = f"loss of {PLATEAU} samples over that of {sizes[-1]}: {', '.join(parts)}"
    what = f"beyond {PLATEAU} samples the loss falls by at most 1 %, every seed"
    return [claim(what, "no visible gain from 128", here, all(flat), "not known")]


def draw(data: Mapping[str, Any]) -> Any:
    """Draws nats per token against the number of samples, with a line and a band for each budget."""
    figure, (axes,) = panels()
    for place, (budget, colour) in enumerate(zip(data["budgets"], itertools.cycle((OURS, GREEN, OTHER, PINK)))):
        runs = [[by_budget[place] for by_budget in one] for one in data["runs"]]
        draw_seeds(axes, data["sizes"], runs, colour, f"budget {budget:g}")
    draw_level(axes, data["dense"], "original")
    axes.axvline(PLATEAU, color="#bbbbbb", linewidth=1, label="paper: flat from here")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="calibration samples", ylabel="held-out nats per token")
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(
    "calibration-size", "Quality of DataSVD against the number of calibration samples",
    "held-out loss after DataSVD with 8 to 2048 calibration samples, uniform ranks", minutes=8, full_minutes=40,
    run=run, draw=draw, paper="no visible gain beyond 128 samples (Fig. 6a)", seeds=(3, 5),
    settings=lambda full: pycode_settings(
        data={"max_tokens": 512 if full else 256, "training": 4096, "evaluation": 64},
        allocation={"budgets": [0.8, 0.6, 0.4]},
    ),
)  # fmt: skip
