"""What a batch is, how a model is called with it, and which of its outputs count."""

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
    if isinstance(batch, Tensor):
        return model(batch)
    return model(*batch)


def token_mask(batch: Batch) -> Tensor | None:
    """The (B, T) boolean mask of real tokens from the batch's `attention_mask`, or None where it has none.

    Raises:
        FlexrankError: the attention mask is not (B, T); a 4-D additive mask does not say which tokens are real.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None:
        return None
    if mask.ndim != 2:
        raise FlexrankError(f"attention_mask has shape {tuple(mask.shape)}; expected (batch, tokens)")
    return mask.bool()


def output_tensor(output: Any) -> Tensor:
    """The tensor that a model's output stands for: itself, its `logits`, else its `last_hidden_state`.

    Raises:
        FlexrankError: the output has none of them.
    """
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
    """Sentence embeddings (B, d): the mean of `hidden` (B, T, d) over real tokens, scaled to length one, in float32.

    Embeddings (B, d) that the model has pooled itself are only scaled.

    Source: the pooling of sentence-transformers' all-MiniLM models. A row with no real token gives a zero vector.
    """
    hidden = hidden.float()
    if hidden.ndim == 2:  # pooled by the model itself
        return functional.normalize(hidden, dim=-1)
    if mask is None:
        pooled = hidden.mean(1)
    else:
        weight = mask.to(hidden.dtype).unsqueeze(-1)
        pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
    return functional.normalize(pooled, dim=-1)


@contextlib.contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; afterwards every submodule trains, or not, as before it."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter (the CPU for a model without any)."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`; other values as they are."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    moved = [value.to(device) if isinstance(value, Tensor) else value for value in batch]
    if hasattr(batch, "_fields"):  # a named tuple takes its values one by one
        return type(batch)(*moved)
    return type(batch)(moved)
