"""What a batch is, how a model is called with it, and which tensor of its output counts."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.errors import FlexrankError

Batch = Mapping[str, Any] | Tensor | tuple[Any, ...] | list[Any]


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Calls `model(**batch)` for a mapping, `model(*batch)` for a tuple or list, `model(batch)` for a tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch) if isinstance(batch, Tensor) else model(*batch)


def token_mask(batch: Batch) -> Tensor | None:
    """The (B, T) boolean mask of real tokens from the batch's `attention_mask`, or None where it has none.

    Another shape is a FlexrankError: a 4-D additive mask does not say which tokens are real.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None:
        return None
    if mask.ndim != 2:
        raise FlexrankError(f"attention_mask has shape {tuple(mask.shape)}; expected (batch, tokens)")
    return mask.bool()


def output_tensor(output: Any) -> Tensor:
    """The tensor in a model's output: itself, its `logits`, else its `last_hidden_state`, else a tuple's first."""
    if isinstance(output, Tensor):
        return output
    for field in ("logits", "last_hidden_state"):
        value = getattr(output, field, None)
        if value is not None:
            return value
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return output[0]
    raise FlexrankError(f"the model returned {type(output).__name__}; expected a tensor, .logits or .last_hidden_state")


def mean_pool(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Embeddings (B, d) of unit length in float32: the mean of `hidden` (B, T, d) over real tokens.

    Embeddings (B, d) that the model has pooled itself are only scaled. A row with no real token gives zeros.
    Source: the pooling of sentence-transformers' all-MiniLM models.
    """
    pooled = hidden.float()
    if hidden.ndim != 2 and mask is None:
        pooled = pooled.mean(1)
    elif hidden.ndim != 2 and mask is not None:
        weight = mask.to(pooled.dtype).unsqueeze(-1)
        pooled = (pooled * weight).sum(1) / weight.sum(1).clamp(min=1)
    return functional.normalize(pooled, dim=-1)


@contextlib.contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; afterwards every submodule has the mode it had before."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter; the CPU for a model without any."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`, and its other values unchanged."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value) for key, value in batch.items()}
    values = map(moved, batch)
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)  # `_fields`: a named tuple
