"""Submodels trained together are those trained alone."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.decompose import decompose_
from flexrank.distill.schedule import scheduled_rate
from flexrank.nn.switch import nested_layers, use_profile
from research.studies.mnist import StackedNetwork, build_network, train_stacked_

RANKS = [(10, 16, 32, 10), (3, 5, 7, 4), (1, 1, 1, 1)]
HOW = {"steps": 5, "learning_rate": 1e-2, "warmup_steps": 2, "batch": 16, "seed": 3}


def elastic() -> nn.Sequential:
    model = build_network("narrow", 0)
    decompose_(model, [name for name, module in model.named_modules() if hasattr(module, "weight")], method="svd")
    return model


def at(model: nn.Sequential, ranks: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(nested_layers(model), ranks, strict=True))


def train_alone(model: nn.Sequential, images: Tensor, targets: Tensor) -> None:
    """One submodel, by torch's own layers, in a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(3))
    for step in range(5):
        rows, order = order[:16], order[16:]
        optimizer.param_groups[0]["lr"] = scheduled_rate(step, 5, 1e-2, 2)
        optimizer.zero_grad()
        student, teacher = model(images[rows]), targets[rows].softmax(-1)
        functional.kl_div(student.log_softmax(-1), teacher, reduction="batchmean").backward()
        optimizer.step()


def test_training_together_is_training_each_alone() -> None:
    images, targets = torch.randn(80, 1, 28, 28), torch.randn(80, 10)
    stacked = StackedNetwork(elastic(), RANKS)
    before = stacked(images).detach()
    train_stacked_(stacked, images, targets, **HOW)
    after = stacked(images).detach()
    for ranks, start, logits in zip(RANKS, before, after, strict=True):
        model = copy.deepcopy(elastic())
        with use_profile(model, at(model, ranks)):
            torch.testing.assert_close(start, model(images).detach(), rtol=1e-4, atol=1e-5)
            train_alone(model, images, targets)
            alone = model(images).detach()
        assert float((alone - start).norm()) > 0.5  # it did train
        torch.testing.assert_close(logits, alone, rtol=1e-3, atol=1e-3)


def test_components_beyond_the_rank_stay_zero_and_random_weights_vary_as_torchs_own() -> None:
    stacked = StackedNetwork(elastic(), RANKS)
    stacked.randomise_(0)
    for u, v in zip(stacked.u, stacked.v, strict=True):
        weight = (u.transpose(1, 2) @ v)[0]
        expected = 1 / (3 * weight.shape[1]) ** 0.5  # of a uniform distribution within 1/√n
        assert float(weight.detach().std()) == pytest.approx(expected, rel=0.3)
    train_stacked_(stacked, torch.randn(40, 1, 28, 28), torch.randn(40, 10), **{**HOW, "batch": 8})
    for factors in (stacked.u, stacked.v):
        for place, factor in enumerate(factors):
            for submodel, ranks in enumerate(RANKS):
                assert not factor[submodel, ranks[place] :].any() and factor[submodel, : ranks[place]].all()
