"""What the tests of consolidation share: a profile, batches, settings, and the error at a profile."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from flexrank.nn.switch import use_profile
from tiny import batch_for

#: A profile of the perceptron.
SMALL = {"0": 3, "2": 4, "4": 2}
SETTINGS = {"steps": 60, "learning_rate": 1e-2, "warmup_steps": 3}


def batches(name: str) -> list:
    batch = batch_for(name)
    if isinstance(batch, torch.Tensor):
        return [torch.randn(8, *batch.shape[1:], generator=torch.Generator().manual_seed(i)) for i in range(6)]
    return [{key: value.roll(shift, 0) for key, value in batch.items()} for shift in range(3)]


def error_at(model: nn.Module, profile: Mapping[str, int], evaluate: Callable[[nn.Module], float]) -> float:
    with use_profile(model, profile):
        return evaluate(model)


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
