"""Their `layernorm_fusion.replace_layers`, `layernorm_fusion.fuse_modules` and `rotate.rotate_and_slice` are run.

Their package's `__init__` imports adapters of other models and data sets, so its modules are imported without it. Of
`ml_collections` they use a single namespace, which we replace. Their block unpacks three values from attention, and
transformers returns two, so we add a third. Their block returns a tuple, and the model gets its first element.
`fuse_modules` centres embeddings, which is right for LayerNorm but changes a Llama; here they are centred beforehand on
both sides. Their RMSNorm has an ε of 1e-5, and so has the model here. The signs of the stream's coordinates are
arbitrary, so logits and norms are compared.
"""

import copy
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from flexrank.data.batches import Batch
from research.baselines import slicegpt
from research.originals.original import Row, difference, importing, row, tiny_model

WIDTHS = (40, 24, 12)


def compare(clone: Path) -> list[Row]:
    """Compares logits and the stored matrices' norms by width, and logits of the model that is only rotated."""
    model, batches = _model()
    logits, lengths, whole = list[float](), list[float](), list[float]()
    with importing(clone, _stubs(clone)):
        for width in (*WIDTHS, model.config.hidden_size):
            ours, theirs = slicegpt.sliced(model, batches, width), _sliced(model, batches, width)
            found = [difference(ours(**batch).logits, _logits(theirs, batch)) for batch in batches]
            (logits if width in WIDTHS else whole).extend(found)
            lengths += _lengths(ours, theirs)
    return [
        row(f"logits at widths {WIDTHS} of {model.config.hidden_size}", logits, 1e-5),
        row("logits, only rotated", whole, 1e-5),
        row("norms of the blocks' matrices and shortcuts", lengths, 1e-5),
    ]


def _model() -> tuple[Any, Sequence[Any]]:
    """Returns the tiny Llama with an untied head, centred embeddings and ε of 1e-5, and its batches."""
    model, _, batches = tiny_model()
    embedding = model.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(embedding.detach().clone())
    model.config.tie_word_embeddings = model.config.use_cache = False
    with torch.no_grad():
        embedding -= embedding.mean(-1, keepdim=True)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5
    return model, batches


def _stubs(clone: Path) -> dict[str, ModuleType]:
    """Returns their package without its `__init__`, and a namespace in place of `ml_collections`."""
    package, collections = ModuleType("slicegpt"), ModuleType("ml_collections")
    package.__path__ = [str(clone / "src" / "slicegpt")]
    collections.ConfigDict = SimpleNamespace  # type: ignore[attr-defined]
    return {"slicegpt": package, "ml_collections": collections}


def _sliced(model: Any, batches: Sequence[Batch], width: int) -> Any:
    """Returns their sliced model, whose blocks return tuples."""
    fusion, rotate, scheduler, adapters = (
        importlib.import_module(f"slicegpt.{name}")
        for name in ("layernorm_fusion", "rotate", "slicing_scheduler", "adapters.llama_adapter")
    )
    adapter = adapters.LlamaModelAdapter(copy.deepcopy(model))
    with _three_values(), warnings.catch_warnings(action="ignore"):  # about names that transformers has renamed
        fusion.replace_layers(adapter, verbose=False)
        fusion.fuse_modules(adapter)
        rotate.rotate_and_slice(adapter, batches, scheduler.ConstSlicingScheduler(width))
    return adapter.model


def _logits(model: Any, batch: Any) -> torch.Tensor:
    block = type(model.model.layers[0])
    own = block.forward
    first = mock.patch.object(block, "forward", lambda *args, **others: own(*args, **others)[0])
    with _three_values(), first, torch.no_grad():
        return model(**batch).logits


def _three_values() -> Any:
    from transformers.models.llama.modeling_llama import LlamaAttention

    own = LlamaAttention.forward
    return mock.patch.object(LlamaAttention, "forward", lambda *args, **others: (*own(*args, **others), None))


def _lengths(ours: Any, theirs: Any) -> list[float]:
    """Compares norms of all blocks' matrices; one side has a last rotation of full width more, which keeps norms."""
    found = list[float]()
    for own, other in zip(ours.model.layers, theirs.model.layers, strict=True):
        pairs = [(own.shortcuts[0], other.attn_shortcut_Q), (own.shortcuts[1], other.mlp_shortcut_Q)]
        for name in (*own.names.readers[0], *own.names.readers[1], *own.names.writers):
            pairs.append((own.get_submodule(name).weight, other.get_submodule(name).weight))
        assert all(a.shape == b.shape for a, b in pairs)
        found += [difference(a.norm(), b.norm()) for a, b in pairs]
    return found
