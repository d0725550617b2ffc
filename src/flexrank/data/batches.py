"""What a batch is, how a model is called with it, and which tensor of the output is used."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank import processes
from flexrank.errors import FlexrankError
from flexrank.files import digest_tensor

Batch = Mapping[str, Any] | Tensor | tuple[Any, ...] | list[Any]
#: The tensor of an output that is used: the first of these that it has.
OUTPUTS = ("logits", "last_hidden_state")
#: Several processes compare their first batch, then one in this many: loaders may diverge later, as on another pass.
COMPARED_EVERY = 100
#: The images and sounds that transformers' models read.
SIGNALS = ("pixel_values", "input_values", "input_features")
#: What a batch is, for error messages.
KINDS = "a tensor for model(x), a tuple or list for model(*batch), or a mapping for model(**batch)"


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Calls `model(**batch)` for a mapping, `model(*batch)` for a tuple or list, `model(batch)` for a tensor.

    A mapping's images and sounds are converted to the model's dtype. Rows that hold several texts (`position_ids`
    without a mask) are read without a cache: with one, transformers lets the texts see each other.

    Raises FlexrankError if the model's forward does not take the batch, or if an encoder-decoder has to make up its
    decoder's inputs, because it is then unknown which of them are real.
    """
    _require_batch(batch)
    named = _without_cache(model, _in_dtype_of(model, batch)) if isinstance(batch, Mapping) else {}
    others: Any = () if isinstance(batch, Mapping) else (batch,) if isinstance(batch, Tensor) else batch
    try:
        output = model(*others, **named)
    except TypeError:
        _require_fitting(model, others, named)
        raise
    if not isinstance(batch, Mapping):
        return output
    has_decoder = getattr(output, "encoder_last_hidden_state", None) is not None
    if has_decoder and _lacks_decoder_inputs(model, batch):
        right = "give decoder_input_ids, and decoder_attention_mask where they are padded"
        raise FlexrankError(f"{type(model).__name__} has a decoder, and the batch has nothing for it; {right}")
    return output


def require_several(batches: Any) -> None:
    """Raises FlexrankError if a single batch is given in place of several: iteration would take it apart."""
    if isinstance(batches, Tensor | Mapping | str):
        right = "a list of batches, or what gives them one by one, such as a DataLoader"
        raise FlexrankError(f"batches is a {type(batches).__name__}; it is {right}")


def _in_dtype_of(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch with images and sounds in the dtype of a transformers model: many such models do not convert them."""
    signals = {
        key: value for key in SIGNALS if isinstance(value := batch.get(key), Tensor) and value.is_floating_point()
    }
    dtype = getattr(model, "dtype", None) if signals else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return batch
    return {**batch, **{key: value.to(dtype) for key, value in signals.items()}}


def _without_cache(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    is_packed = batch.get("position_ids") is not None and batch.get("attention_mask") is None
    has_cache = getattr(getattr(model, "config", None), "use_cache", None) is True
    return {"use_cache": False, **batch} if is_packed and has_cache else batch


def _lacks_decoder_inputs(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the model's forward takes them, and the batch has none; detectors of objects have queries instead."""
    given = (batch.get(key) is not None for key in ("decoder_input_ids", "decoder_inputs_embeds"))
    return not any(given) and "decoder_input_ids" in inspect.signature(model.forward).parameters


def _require_batch(batch: Any) -> None:
    if not isinstance(batch, Tensor | Mapping | tuple | list):
        raise FlexrankError(f"a batch is a {type(batch).__name__}; it is {KINDS}")
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(ids, Tensor) and ids.ndim < 2:
        raise FlexrankError(f"input_ids has shape {tuple(ids.shape)}; expected (batch, tokens)")


def _require_fitting(model: nn.Module, others: Iterable[Any], named: Mapping[str, Any]) -> None:
    """Raises FlexrankError if the model's forward does not take this number of arguments, or these names."""
    try:
        inspect.signature(model.forward).bind(*others, **named)
    except TypeError as error:
        problem = f"{type(model).__name__} cannot be called with a batch: {error}"
        raise FlexrankError(f"{problem}; a batch is {KINDS}, and has no labels that the model does not take") from None


def token_mask(batch: Batch) -> Tensor | None:
    """The (B, T) boolean mask of real tokens from the batch's `attention_mask`, or None if it has none.

    Raises FlexrankError for another shape: a 4-D additive mask does not say which tokens are real.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None:
        return None
    return _checked(mask, "attention_mask")


def output_mask(batch: Batch) -> Tensor | None:
    """The (B, T) mask of the real tokens in a model's output: the decoder's if the batch has `decoder_input_ids`.

    Without a `decoder_attention_mask` all of the decoder's tokens are real.
    """
    if not isinstance(batch, Mapping) or batch.get("decoder_input_ids") is None:
        return token_mask(batch)
    mask = batch.get("decoder_attention_mask")
    return _checked(torch.ones_like(batch["decoder_input_ids"]) if mask is None else mask, "decoder_attention_mask")


def row_masks(batch: Batch) -> list[Tensor]:
    """The masks of encoder and decoder tokens that leave rows out; a layer's rows belong to the mask of the same size.

    Raises:
        FlexrankError: the two have the same number of tokens but different masks.
    """
    last = output_mask(batch)
    if last is None:
        return []
    first = token_mask(batch)
    if first is None:
        assert isinstance(batch, Mapping)
        read = next((batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None), None)
        first = last if read is None else torch.ones(read.shape[:2], dtype=torch.bool, device=last.device)
    if first.numel() == last.numel() and not torch.equal(first, last):
        raise FlexrankError(
            f"attention_mask and decoder_attention_mask are both {tuple(last.shape)} and differ: a layer's rows do not "
            "tell whose they are; pad one of the two to another length"
        )
    return [mask for mask in (first, last)[: 1 + (first.numel() != last.numel())] if not bool(mask.all())]


def batch_rows(batch: Batch) -> int:
    """The number of rows in a batch: the length of its first tensor that has one; 0 without any."""
    values = [batch] if isinstance(batch, Tensor) else list(batch.values() if isinstance(batch, Mapping) else batch)
    return next((len(value) for value in values if isinstance(value, Tensor) and value.ndim), 0)


def one_row(batch: Batch) -> Batch:
    """The first row of a batch; all of it if its tensors have several numbers of rows, as where images are patches."""
    values = [batch] if isinstance(batch, Tensor) else batch.values() if isinstance(batch, Mapping) else batch
    counts = {len(value) for value in values if isinstance(value, Tensor) and value.ndim}
    return batch if len(counts) > 1 else some_rows(batch, slice(0, 1))


def some_rows(batch: Batch, rows: slice | Tensor, count: int | None = None) -> Batch:
    """Selects rows of a batch, in each tensor that has `count` of them; everything else stays as it is.

    Args:
        rows: a slice, or a tensor of indices.
        count: by default that of the first tensor.
    """
    count = batch_rows(batch) if count is None else count
    return _mapped(batch, lambda one: one[rows] if one.ndim and len(one) == count else one)


def _checked(mask: Tensor, key: str) -> Tensor:
    if mask.ndim != 2:
        raise FlexrankError(f"{key} has shape {tuple(mask.shape)}; expected (batch, tokens)")
    if mask.is_floating_point() and bool((mask < 0).any()):
        raise FlexrankError(f"{key} holds values below 0, as one that is added to scores; expected 1 for real tokens")
    return mask.bool()


def output_tensor(output: Any) -> Tensor:
    """The tensor in a model's output: the output itself, or its `logits`, `last_hidden_state`, or first element."""
    if isinstance(output, Tensor):
        return output
    for field in OUTPUTS:
        value = output.get(field) if isinstance(output, Mapping) else getattr(output, field, None)
        if value is not None:
            return value
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return output[0]
    raise FlexrankError(f"the model returned {type(output).__name__}; expected a tensor, .logits or .last_hidden_state")


def mean_pool(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Embeddings (B, d) of unit length in float32: the mean of `hidden` (B, T, d) over real tokens.

    Embeddings (B, d) that the model has pooled itself are only normalised. A row without real tokens gives zeros.
    Source: the pooling of sentence-transformers' all-MiniLM models.
    """
    pooled = hidden.float()
    if hidden.ndim != 2 and mask is None:
        pooled = pooled.mean(1)
    elif hidden.ndim != 2 and mask is not None:
        weight = mask.to(pooled.dtype).unsqueeze(-1)
        # Zero times NaN is NaN: padding must be cleared, not only weighted by zero.
        pooled = pooled.masked_fill(weight == 0, 0).mul(weight).sum(1) / weight.sum(1).clamp(min=1)
    return functional.normalize(pooled, dim=-1)


@contextlib.contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Sets eval mode inside the block; afterwards every submodule has the mode it had before.

    If a model has recurrent layers cuDNN is off meanwhile, because its own have no gradients in eval mode.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    is_recurrent = any(isinstance(module, nn.RNNBase) for module, _ in modes)
    for model in models:
        model.eval()
    try:
        with torch.backends.cudnn.flags(enabled=False) if is_recurrent else contextlib.nullcontext():
            yield
    finally:
        for module, training in modes:
            module.training = training


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter; the CPU for a model without any."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`, and its other values unchanged."""
    return _mapped(batch, lambda one: one.to(device))


def digest_batch(batch: Batch) -> str:
    """The batch as text, with a digest in place of each tensor: torch's own text omits the middle of large tensors."""
    return repr(_mapped(batch, digest_tensor))


def require_alike(number: int, batch: Batch) -> None:
    """Raises FlexrankError unless all processes got the same batch; one in `COMPARED_EVERY` is compared."""
    if number % COMPARED_EVERY or processes.count() == 1:
        return
    if not processes.same_everywhere(digest_batch(batch)):
        right = "give all the same, without a DistributedSampler and shuffled by one seed"
        raise FlexrankError(f"processes got other batches; flexrank shares them out itself: {right}")


def require_same_number(number: int) -> None:
    """Raises FlexrankError unless all processes got as many batches."""
    if not processes.same_everywhere(number):
        right = "give all the same, without a DistributedSampler"
        raise FlexrankError(f"processes got {number} batches here, and others elsewhere; {right}")


def _mapped(batch: Batch, change: Callable[[Tensor], Any]) -> Any:
    """The batch with `change` applied to each tensor, and its other values as they are."""
    _require_batch(batch)

    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: changed(value) for key, value in batch.items()}
    values = map(changed, batch)
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)  # `_fields`: a named tuple
