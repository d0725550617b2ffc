"""Metrics of a model over held-out batches.

Functions that run a model do so in eval mode without gradients, and restore each module's mode. All functions raise
FlexrankError if there is nothing to evaluate, or a value is not finite; such values are never skipped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.data.batches import (
    Batch,
    call_model,
    eval_mode,
    mean_pool,
    model_device,
    output_mask,
    output_tensor,
    to_device,
    token_mask,
)
from flexrank.errors import FlexrankError


def embed(model: nn.Module, batches: Iterable[Batch]) -> Tensor:
    """Embeddings (N, d) of unit length in float32 on the CPU, in the order of the texts.

    Token states (B, T, d) are mean-pooled with the batch's mask; outputs (B, d) are only normalised. If the batches
    have an `order`, as `text.SentenceBatches` do, it restores the order of the texts.
    """
    outputs = _outputs(model, batches)
    rows = torch.cat([mean_pool(output_tensor(output), output_mask(batch)).cpu() for output, batch in outputs])
    order = getattr(batches, "order", None)
    return rows if order is None else rows[torch.as_tensor(order).argsort()]


def mean_cosine(first: Tensor, second: Tensor) -> float:
    """Mean cosine similarity of the corresponding rows of two (N, d) tensors; both must be finite."""
    _require_alike(first, second)
    return float(functional.cosine_similarity(first.double(), second.double(), dim=-1).mean())


def retrieval_mrr(queries: Tensor, documents: Tensor, block: int = 1024) -> float:
    """Mean reciprocal rank of document i among all documents (N, d) for query i of (N, d), by inner product.

    Among equal scores the right document ranks last. `block` queries are scored at once, which takes block · N numbers.
    """
    _require_alike(queries, documents)
    queries, documents = queries.float(), documents.float()
    total = 0.0
    for start in range(0, len(queries), block):
        scores = queries[start : start + block] @ documents.T
        own = scores.diagonal(start).unsqueeze(1)
        total += float((scores >= own).sum(1).double().reciprocal().sum())
    return total / len(queries)


def spearman(first: Sequence[float] | Tensor, second: Sequence[float] | Tensor) -> float:
    """Spearman's rank correlation of two finite series of equal length, neither of them constant."""
    from scipy import stats

    one, two = (torch.as_tensor(values, dtype=torch.float64) for values in (first, second))
    is_finite = bool(torch.isfinite(one).all() and torch.isfinite(two).all())
    if one.shape != two.shape or one.ndim != 1 or not is_finite or min(len(one.unique()), len(two.unique())) < 2:
        raise FlexrankError("a rank correlation needs two finite series of equal length, neither of them constant")
    return float(stats.spearmanr(one.numpy(), two.numpy()).statistic)


def nats_per_token(model: nn.Module, batches: Iterable[Batch], chunk: int = 1024) -> float:
    """Mean cross entropy, in nats, of each real token given those before it in its row (causal language models).

    Args:
        model: returns logits (B, T, V).
        batches: `input_ids` (B, T), with an `attention_mask` where rows are padded; or the ids alone.
        chunk: tokens per log-softmax, in float32.
    """
    total, count = 0.0, 0
    for output, batch in _outputs(model, batches):
        logits, targets = next_tokens(output, batch)
        count += len(targets)
        for part, target in zip(logits.split(chunk), targets.split(chunk), strict=True):
            total += float(functional.cross_entropy(part.float(), target, reduction="none").sum(dtype=torch.float64))
    if not count:
        raise FlexrankError("no batch has a row of two real tokens; there is no next token to predict")
    return total / count


def next_tokens(output: object, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits (P, V) that predict each real token after another in its row, and these tokens (P,)."""
    ids, mask = _token_ids(batch), token_mask(batch)
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    predicted = mask[:, 1:] & mask[:, :-1]
    return output_tensor(output)[:, :-1][predicted], ids[:, 1:][predicted]


def predict(model: nn.Module, batches: Iterable[Batch]) -> Tensor:
    """The class (N,) int64 of each row: the index of its largest logit, from outputs (B, classes)."""
    return torch.cat([output_tensor(output).argmax(-1).cpu() for output, _ in _outputs(model, batches)])


def _outputs(model: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[object, Batch]]:
    """The model's output for each batch, and the batch on the model's device."""
    device, number = model_device(model), 0
    for number, batch in enumerate(batches, start=1):
        batch = to_device(batch, device)
        with eval_mode(model), torch.inference_mode():  # per batch: the modes must not be on while the caller runs
            output = call_model(model, batch)
            _require_finite(output_tensor(output), batch, number)
        yield output, batch
    if not number:
        raise FlexrankError("there are no batches to evaluate on; give at least one")


def _require_finite(output: Tensor, batch: Batch, number: int) -> None:
    if bool(torch.isfinite(output).all()):
        return
    mask = output_mask(batch)  # outputs at padding are never read, so they may be anything
    if mask is None or output.shape[:2] != mask.shape or not bool(torch.isfinite(output[mask]).all()):
        raise FlexrankError(f"batch {number}: the model's output is not finite (NaN or infinity); check its weights")


def _token_ids(batch: Batch) -> Tensor:
    if not isinstance(batch, (Mapping, Tensor)):
        batch = batch[0]
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise FlexrankError("a language batch needs input_ids of shape (batch, tokens)")
    return ids


def _require_alike(first: Tensor, second: Tensor) -> None:
    if first.shape != second.shape or not first.numel():
        raise FlexrankError(f"expected two like shapes, not empty; got {tuple(first.shape)} and {tuple(second.shape)}")
    for name, values in (("first", first), ("second", second)):
        if not bool(torch.isfinite(values).all()):
            raise FlexrankError(f"the {name} of the two holds NaN or infinity; check the model's weights")
