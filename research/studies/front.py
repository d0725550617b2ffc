"""The true Pareto front, from submodels trained one by one, against one elastic network (FlexRank, section 3.4).

Each submodel of the grid is trained alone, from random weights and from DataSVD; the elastic network trains one set of
weights for profiles of that grid. Teacher, loss, optimiser, schedule and the sampling of batches are the same. A
submodel that training makes worse than DataSVD left it, such as the largest, counts as it was before.
"""

import copy
import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexrank import ProfileChain, SensitivityTable, allocate_ranks, collect_moments, decompose_, probe_sensitivity
from flexrank.calibrate import GradientLoss
from flexrank.data.batches import Batch
from flexrank.data.halves import Half
from flexrank.distill import distill_, distillation_evaluator
from flexrank.distill.objectives import LogitObjective
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers, use_profile
from flexrank.profiles.costs import deployed_parameters, rank_levels
from flexrank.progress import track
from research.experiment import EVERY_RANK, Experiment, Ledger, Request
from research.figures import GREEN, NEUTRAL, OTHER, OURS, panels
from research.measures import inference
from research.result import Result, between, claim, measured, spreads, table
from research.studies import mnist
from research.studies.mnist import StackedNetwork, draw_rows, train_stacked_

BUDGETS = tuple(round(0.1 * step, 1) for step in range(2, 10))  # at 1 both are the network itself
CALIBRATION, PROBE, IMAGES_A_STEP = 2048, 2000, 64
#: For submodels trained alone, by their start: optimiser steps, and a good learning rate among those tried.
STEPS = {"random": 500, "DataSVD": 400}
LEARNING_RATES = {"random": 1e-2, "DataSVD": 5e-3, "elastic": 3e-3}
WARMUP = 20
#: On average as many per budget as a submodel from DataSVD has.
ELASTIC_STEPS = STEPS["DataSVD"] * len(BUDGETS)
#: Submodels trained in one batched computation, few enough for their activations to fit the cache.
CHUNK = 50
#: The levels, of ten, that the coarse grid takes: 4⁴ = 256 submodels.
COARSE = (0, 3, 6, 9)
OBJECTIVE = LogitObjective()
#: Names of the table's rows.
ELASTIC, CHOSEN = "elastic network", "the elastic network's profiles, each trained alone"
Run = Mapping[str, Any]


def run(request: Request) -> Result:
    """Runs the study on the coarse grid, or with `full` on all 10⁴ submodels."""
    levels = tuple(range(mnist.LEVELS)) if request.full else COARSE
    settings = {
        "levels": levels, "steps": STEPS, "elastic_steps": ELASTIC_STEPS, "learning_rates": LEARNING_RATES,
        "images_a_step": IMAGES_A_STEP, "calibration": CALIBRATION, "probe": PROBE, "epochs": mnist.EPOCHS,
        "submodels_at_once": CHUNK, "warmup": WARMUP, "budgets": BUDGETS,
    }  # fmt: skip
    ledger = Ledger(request.work, settings)
    runs = [_Seed(seed, levels, ledger, request.half).run() for seed in range(request.seeds)]
    compared = [compare(one) for one in runs]
    rows = [[name, *spreads(rows[name] for rows in compared)] for name in compared[0]]
    title = "Divergence to the network on test images, by budget; of a front, the best of at most the elastic size"
    settings |= {"seeds": request.seeds, "submodels": len(levels) ** 4}
    tables = [table(title, ["", *BUDGETS], rows, digits=4)]
    return measured(settings, tables, _claims(compared), _figure_data(runs[0]))


class _Seed:
    """One pretrained network: the grid of its submodels, each trained alone, and the elastic network."""

    def __init__(self, seed: int, levels: Sequence[int], ledger: Ledger, half: Half):
        self.seed, self.levels, self.ledger = seed, levels, ledger
        self.images, labels = mnist.load_images("train")
        self.test_images, self.test_labels = mnist.load_images("test", half)
        self.network = mnist.kept_network(ledger.directory / f"network-{seed}", "narrow", self.images, labels, seed)
        with inference(self.network):
            self.targets, self.test_targets = self.network(self.images), self.network(self.test_images)
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed))
        calibration, self.probe = order[:CALIBRATION], order[CALIBRATION:][:PROBE]
        batches = mnist.batches_of(self.images[calibration])
        self.datasvd, self.elastic = (self.decomposed(batches, loss) for loss in (None, OBJECTIVE.fisher_loss))
        self.shapes = [layer.matrix_shape for layer in nested_layers(self.elastic).values()]
        ranks = [[rank_levels(shape, mnist.LEVELS, "ranks")[level] for level in levels] for shape in self.shapes]
        self.grid = list(itertools.product(*ranks))

    def decomposed(self, batches: Sequence[Batch], gradient_loss: GradientLoss | None) -> nn.Sequential:
        """Decomposes by DataSVD, or as a run does by default: with outputs weighted by the loss's gradients too."""
        model = copy.deepcopy(self.network)
        decompose_(model, collect_moments(model, batches, select_layers(model), gradient_loss=gradient_loss))
        return model

    def run(self) -> dict[str, Any]:
        """Returns the grid's rows [share of dense parameters, *ranks], and what its submodels and the chain reach."""
        dense = sum(m * n for m, n in self.shapes)
        return {
            "grid": [[sum(map(deployed_parameters, self.shapes, ranks)) / dense, *ranks] for ranks in self.grid],
            "alone": {origin: self.trained_alone(origin) for origin in STEPS},
            "elastic": self.ledger.take(f"seed {self.seed}, elastic chain, by gradients", self.elastic_front),
        }

    def figures(self, logits: Tensor) -> list[list[float]]:
        """Returns [divergence to the network, test error rate] for each submodel's logits (M, N, classes)."""
        errors = (logits.argmax(-1) != self.test_labels).double().mean(-1)
        return torch.stack([mnist.divergence(logits, self.test_targets).double(), errors], 1).tolist()

    def trained_alone(self, origin: str) -> list[list[float]]:
        """Returns `figures` of every submodel of the grid, each trained alone; from DataSVD, of the better state."""
        figures, starts = [], range(0, len(self.grid), CHUNK)
        for start in track(starts, f"seed {self.seed}: training {len(self.grid)} submodels from {origin}"):
            ranks = self.grid[start : start + CHUNK]
            figures += self.ledger.take(f"seed {self.seed}, {origin}, {start}", self._train_chunk, origin, ranks)
        return figures

    def _train_chunk(self, origin: str, ranks: Sequence[Sequence[int]]) -> list[list[float]]:
        stacked = StackedNetwork(self.datasvd, ranks)
        before = self._stacked_figures(stacked)
        if origin == "random":
            stacked.randomise_(self.seed)
        train_stacked_(
            stacked, self.images, self.targets, steps=STEPS[origin], learning_rate=LEARNING_RATES[origin],
            warmup_steps=WARMUP, batch=IMAGES_A_STEP, seed=self.seed,
        )  # fmt: skip
        after = self._stacked_figures(stacked)
        return after if origin == "random" else list(map(min, before, after))

    @torch.inference_mode()
    def _stacked_figures(self, stacked: StackedNetwork) -> list[list[float]]:
        return self.figures(torch.cat([stacked(images) for images in self.test_images.split(1000)], 1))

    def elastic_front(self) -> dict[str, Any]:
        """Returns shares, ranks and `figures` of the chain's profiles at BUDGETS, before and after consolidation."""
        model = copy.deepcopy(self.elastic)
        evaluate = distillation_evaluator(self.network, mnist.batches_of(self.images[self.probe]), OBJECTIVE)
        table = probe_sensitivity(model, evaluate, mnist.LEVELS, spacing="ranks", **EVERY_RANK)
        chain = allocate_ranks(at_levels(table, self.levels), BUDGETS, **EVERY_RANK)
        before = self._chain_figures(model, chain)
        rows = draw_rows(len(self.images), IMAGES_A_STEP, ELASTIC_STEPS, self.seed)
        distill_(
            model, self.network, (self.images[chosen] for chosen in rows), chain, objective=OBJECTIVE,
            steps=ELASTIC_STEPS, learning_rate=LEARNING_RATES["elastic"], warmup_steps=WARMUP, seed=self.seed,
            max_norm=float("inf"),
        )  # fmt: skip
        shares = [entry.parameters / chain.dense_parameters for entry in chain.requested]
        ranks = [[entry.profile[name] for name in nested_layers(model)] for entry in chain.requested]
        return {"shares": shares, "ranks": ranks, "before": before, "after": self._chain_figures(model, chain)}

    def _chain_figures(self, model: nn.Module, chain: ProfileChain) -> list[list[float]]:
        figures = []
        for entry in chain.requested:
            with use_profile(model, entry.profile), inference(model):
                figures += self.figures(model(self.test_images)[None])
        return figures


def at_levels(table: SensitivityTable, levels: Sequence[int]) -> SensitivityTable:
    """Returns the table with only these of each layer's levels, two or more."""
    picked = operator.itemgetter(*levels)
    ranks = {name: picked(values) for name, values in table.ranks.items()}
    errors = {name: picked(values) for name, values in table.errors.items()}
    return dataclasses.replace(table, ranks=ranks, errors=errors)


def compare(one: Run) -> dict[str, list[float]]:
    """Returns one seed's rows of the table, by budget."""
    elastic, rows = one["elastic"], {}
    states = {"untrained": elastic["before"], ELASTIC: elastic["after"]}
    for figure, what in enumerate(("divergence", "test error")):
        for origin, alone in one["alone"].items():
            rows[f"front from {origin}: {what}"] = [
                min(own[figure] for (size, *_), own in zip(one["grid"], alone, strict=True) if size <= share + 1e-12)
                for share in elastic["shares"]
            ]
        rows |= {f"{name}: {what}": [own[figure] for own in of] for name, of in states.items()}
    trained = {tuple(ranks): own for (_, *ranks), (own, _) in zip(one["grid"], one["alone"]["DataSVD"], strict=True)}
    chosen = [trained[tuple(ranks)] for ranks in elastic["ranks"]]
    for origin in one["alone"]:
        rows[f"{ELASTIC} / front from {origin}"] = _over(rows[f"{ELASTIC}: divergence"], rows, origin)
    return rows | {f"{CHOSEN} / front from DataSVD": _over(chosen, rows, "DataSVD")}


def _over(divergences: Sequence[float], rows: Mapping[str, Sequence[float]], origin: str) -> list[float]:
    return [own / best for own, best in zip(divergences, rows[f"front from {origin}: divergence"], strict=True)]


def _claims(compared: Sequence[Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    aligned, choices, scratch = (
        np.array([rows[f"{name} / front from {origin}"] for rows in compared])
        for name, origin in ((ELASTIC, "DataSVD"), (CHOSEN, "DataSVD"), (ELASTIC, "random"))
    )
    means, by_budget, better = aligned.mean(1), aligned.mean(0), int((scratch < 1).sum())
    return [
        claim("the elastic network's divergence is within 10 % of the front's from DataSVD, a mean over budgets",
              "recovers the front", f"{between(means.tolist(), '.2f')} times the front's; worst at "
              f"{BUDGETS[by_budget.argmax()]:g}, {by_budget.max():.2f}", bool(means.max() <= 1.1),
              f"its profiles trained alone are {choices.mean():.2f} times the front's"),
        claim("it is better than the front of models trained from scratch, at every budget and seed",
              "outperforms them", f"{between(scratch.mean(1).tolist(), '.2f')} times that front's divergence; better "
              f"in {better} of {scratch.size} cases", better == scratch.size, f"at worst {scratch.max():.2f} times it"),
    ]  # fmt: skip


def _figure_data(one: Run) -> dict[str, Any]:
    """Rounds to four digits; of a large grid it keeps every fourth submodel and all of the front."""
    shown: dict[str, Any] = {"budgets": list(BUDGETS), "elastic": one["elastic"]}
    for origin, figures in one["alone"].items():
        order = sorted((row[0], divergence) for row, (divergence, _) in zip(one["grid"], figures, strict=True))
        points = [[round(share, 4), float(f"{value:.4g}")] for share, value in order]
        below = itertools.accumulate((value for _, value in order), min, initial=float("inf"))
        front = [point for point, (_, value), best in zip(points, order, below, strict=False) if value < best]
        shown[origin] = {"points": points[:: 4 if len(points) > 1000 else 1], "front": front}
    return shown


def draw(data: Mapping[str, Any]) -> Any:
    """Draws divergence against size: every submodel trained alone, both fronts, and the elastic network's sizes."""
    figure, (axes,) = panels(size=(7, 4.4))
    for origin, colour in (("random", OTHER), ("DataSVD", GREEN)):
        points = zip(*data[origin]["points"], strict=True)
        axes.scatter(*points, s=4, alpha=0.25, color=colour, linewidths=0, rasterized=True)
        label = f"front, each trained alone from {origin}" + (" weights" if origin == "random" else "")
        axes.plot(*zip(*data[origin]["front"], strict=True), color=colour, linestyle="--", linewidth=1.5, label=label)
    elastic = data["elastic"]
    for when, colour, label in (("before", NEUTRAL, "untrained"), ("after", OURS, "one elastic network")):
        heights = [divergence for divergence, _ in elastic[when]]
        axes.plot(elastic["shares"], heights, "o-", color=colour, markersize=4.5, linewidth=1.8, label=label, zorder=3)
    values = [value for _, value in data["DataSVD"]["front"]] + heights
    lowest = min(value for value in values if value > 0)  # near the full size rounding may leave 0, or less
    axes.set(yscale="log", xlabel="deployed parameters of the layers, over dense", xlim=(0, 1.02))
    axes.set(ylim=(lowest * 0.4, None), ylabel="divergence to the pretrained network, test images")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    name="front", title="The true Pareto front of submodels trained one by one, and one elastic network",
    shows="the gap, budget by budget, between the elastic network and the best of all submodels trained independently",
    paper="the elastic network recovers the front from DataSVD, and outperforms models trained from scratch (Fig. 3)",
    minutes=10, full_minutes=95, has_halves=True, seeds=(3, 1), run=run, draw=draw,
)  # fmt: skip
