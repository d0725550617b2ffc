"""Cascades of ResNet-20's sizes on CIFAR-10: the stated loss, the loss on held-out images, and the operations saved.

Both sizes are deployed from one artefact, after a short consolidation. Thresholds are calibrated on one half of the
test images, without their classes, and measured on the other.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexrank import (
    ProfileChain,
    allocate_ranks,
    cascade,
    collect_moments,
    curvature_sensitivity,
    decompose_,
    deploy,
    distill_,
    select_layers,
)
from flexrank.data.halves import half_indices
from flexrank.distill.objectives import LogitObjective
from research.assets import assets_directory
from research.experiment import Experiment, Ledger, Request
from research.measures import accuracy
from research.result import Result, goal, measured, table
from research.studies import cifar
from research.studies.vision import RESNET_FILE

#: The sizes that answer first; the one that they fall back to; the stated losses.
SMALL, LARGE, LOSSES = (0.7, 0.5, 0.3), 1.0, (0.01, 0.02, 0.05)
#: Images for the moments, per step and of the test; steps of consolidation.
CALIBRATION, BATCH, TEST, STEPS = 512, 64, 4000, 150


def run(request: Request) -> Result:
    """Consolidates the sizes, then measures a cascade for each small one and each loss."""
    assets = assets_directory("cifar10", RESNET_FILE)
    training, _ = cifar.read_tensors(assets / "cifar10" / cifar.TRAIN)
    images, classes = cifar.read_tensors(assets / "cifar10" / cifar.TEST)
    settings = {"large": LARGE, "calibration": CALIBRATION, "batch": BATCH, "test": TEST, "steps": STEPS}
    network = cifar.load_resnet20(assets / RESNET_FILE)
    ledger = Ledger(request.work, settings | {"small": SMALL, "losses": LOSSES})
    data = ledger.take("cascades", measure, network, training, images[:TEST], classes[:TEST])
    return measured(settings, [_table(data)], [_goal(data["rows"])], data)


def measure(network: nn.Module, training: Tensor, images: Tensor, classes: Tensor) -> dict[str, Any]:
    """Returns a row for each small size and loss: the report on held-out images, and the accuracies."""
    model, chain = consolidated(network, training)
    places = {half: half_indices(half, images) for half in ("tuning", "reporting")}
    calibration = list(cifar.scaled_batches(images[places["tuning"]], cifar.RESNET_SCALING))
    held_out = list(cifar.scaled_batches(images[places["reporting"]], cifar.RESNET_SCALING))
    right = classes[places["reporting"]]
    large, rows = deploy(model, chain.at(LARGE)), []
    for budget in SMALL:
        small = deploy(model, chain.at(budget))
        alone = accuracy(small, held_out, right)
        for loss in LOSSES:
            both = cascade(small, large, calibration, loss)
            facts = dataclasses.asdict(both.measure(held_out)) | {"accuracy": accuracy(both, held_out, right)}
            rows.append({"small": budget, "loss": loss, "alone": alone, **facts})
    return {"large": accuracy(large, held_out, right), "rows": rows}


def consolidated(network: nn.Module, training: Tensor) -> tuple[nn.Module, ProfileChain]:
    """Returns the consolidated elastic network and its sizes."""
    first, rest = training[:CALIBRATION], training[CALIBRATION:]
    batches = list(cifar.scaled_batches(first, cifar.RESNET_SCALING))
    model, objective = copy.deepcopy(network), LogitObjective()
    layers = select_layers(model)
    moments = collect_moments(model, batches, layers, side="input", gradient_loss=objective.fisher_loss)
    decompose_(model, moments)
    chain = allocate_ranks(curvature_sensitivity(model, moments, len(first)), (*SMALL, LARGE))
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))[: STEPS * BATCH]
    steps = [cifar.RESNET_SCALING(rest[rows]) for rows in order.split(BATCH)]
    distill_(model, network, steps, chain, objective=objective, steps=STEPS, learning_rate=1e-3, warmup_steps=10)
    return model, chain


def _goal(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the goal that shares stay within the stated loss.

    The promise is a probability, so the goal also says how likely such shares are if it is kept.
    """
    from scipy.stats import binom

    chance = min(
        float(binom.sf(round(row["differing"] * row["samples"]) - 1, row["samples"], row["loss"])) for row in rows
    )
    within = sum(row["differing"] <= row["loss"] for row in rows)
    why = f"at a true rate of the stated loss as many answers differ with a chance of {chance:.2g}, or more"
    what = "shares of held-out images whose answers differ, within the stated loss"
    return goal(what, f"{len(rows)} of {len(rows)}", f"{within} of {len(rows)}", within == len(rows), why)


def _table(data: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("loss", "differing", "answered_by_small", "operations_saved", "alone", "accuracy")
    names = ("stated loss", "differing", "answered by small", "operations saved", "small alone", "cascade")
    rows = [[f"{row['small']:g}", *(row[key] for key in keys)] for row in data["rows"]]
    title = f"shares of held-out images; accuracy of the large size {data['large']:.4f}"
    return table(title, ["small size", *names], rows, (2, 4, 3, 3, 4, 4))


EXPERIMENT = Experiment(
    "cascade", "Cascades of two sizes",
    "held-out answers that differ from the large size's, by the stated loss, and operations saved", minutes=6, run=run,
)  # fmt: skip
