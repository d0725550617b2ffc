"""Turns a deployed transformers model into its original architecture: each layer multiplied out to one matrix."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.nn.experts import SEPARATE_KEY, separate_experts
from flexrank.nn.gauge_aligned import GaugeAlignedLayer
from flexrank.nn.matrix import bias_of, weight_matrix


@torch.no_grad()
def dense_model(small: Any, directory: Path) -> Any:
    """A model of the class that `directory`'s config names, which computes the same function as the deployed model.

    Its layers are those that transformers builds: `nn.Linear`, GPT-2's `Conv1D`, `nn.Conv2d`. Ties are kept. The
    weights are multiplied in float64 and rounded once.

    Raises:
        FlexrankError: a tensor of the original architecture has no counterpart in the deployed model, or another shape.
    """
    plain = models.skeleton(directory)
    with separate_experts(plain) if vars(plain.config).pop(SEPARATE_KEY, False) else contextlib.nullcontext():
        _fill(plain, small)
    return plain


def _fill(plain: Any, small: Any) -> None:
    """Copies all tensors of a deployed model into its original architecture; deployed layers are multiplied out."""
    replaced, state = models.attached_layers(small), small.state_dict()
    for name in replaced:
        _fill_layer(name, plain.get_submodule(name), small.get_submodule(name))
    for name, value in plain.state_dict().items():
        if name.rpartition(".")[0] in replaced:
            continue
        if name not in state or state[name].shape != value.shape:
            problem = "has no counterpart in the deployed model; export that again, with its own config.json"
            raise FlexrankError(f"tensor {name!r} of {type(plain).__name__} {problem}")
        value.copy_(state[name])


def _fill_layer(name: str, plain: nn.Module, deployed: nn.Module) -> None:
    """Copies a deployed layer's matrix (m, n) and bias (m,) into the original architecture's layer."""
    if isinstance(deployed, GaugeAlignedLayer):
        matrix, bias = deployed.dense()
    else:
        matrix, bias = weight_matrix(deployed), bias_of(deployed)
    target, own = weight_matrix(plain), bias_of(plain)
    if target.shape != matrix.shape or (own is None) != (bias is None):
        raise FlexrankError(f"layer {name!r} does not fit its {type(plain).__name__} in the plain architecture")
    target.copy_(matrix)
    if own is not None and bias is not None:
        own.copy_(bias)
