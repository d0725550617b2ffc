"""SliceGPT: the residual stream in its first principal components (Ashkboos et al., ICLR 2024).

RMSNorm without weights commutes with rotations, so the stream can have other coordinates after the embedding, each
attention and each feed-forward. There it is x Q, where Q (d × k) holds the first k principal components of the signal
X (t × d) of the model sliced so far; residual connections are multiplied by Qᵀ Q', which counts as parameters. As in
the paper's code, the last feed-forward writes all d coordinates, so the final norm and the head stay as they are. A
tied embedding is not sliced but followed by its Q (d × k): the paper's separate, sliced copy of it stores more.

LayerNorm is RMSNorm of the centred stream (the paper's section 3.1): there X is centred, and so are the columns of Q,
so whatever is multiplied by Q is centred by it. Only decoders whose norms come first are covered (`MODELS`); a
post-norm encoder such as BERT has no such form.
"""

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from flexrank.calibrate import Hooks
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, to_device, token_mask
from flexrank.nn.matrix import bias_of, matrix_shape, weight_matrix
from research.baselines import architectures
from research.baselines.architectures import Names
from research.baselines.method import (
    CompressedModel,
    Layers,
    Loss,
    SizeMethod,
    parameter_count,
    parameter_limit,
    replace_matrix_,
)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The names of a decoder's modules in transformers; those of norms and layers, in a block."""

    blocks: str
    embedding: str  #: of tokens; it may be tied to the head
    positions: str | None  #: the embedding of positions
    norms: tuple[str, str]
    layers: Names

    @property
    def halves(self) -> tuple[str, str]:
        """Attention and feed-forward."""
        return self.layers.output.partition(".")[0], self.layers.down.partition(".")[0]

    @property
    def readers(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The layers of each half that read the stream."""
        return self.layers.projections, self.layers.ups

    @property
    def writers(self) -> tuple[str, str]:
        """The layer of each half that writes to the stream."""
        return self.layers.output, self.layers.down


_LLAMA = Decoder(
    "model.layers", "model.embed_tokens", None, ("input_layernorm", "post_attention_layernorm"), architectures.LLAMA
)
_GPT2 = Decoder("transformer.h", "transformer.wte", "transformer.wpe", ("ln_1", "ln_2"), architectures.GPT2)
#: By transformers' model type.
MODELS = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "gpt2": _GPT2}
#: For one batch: h (b × t × d), the mask of its real tokens, and the other arguments of each block's call.
Signal = tuple[Float[Tensor, "b t d"], Tensor | None, list[dict[str, Any]]]


class SlicedNorm(nn.Module):
    """x / √(‖x‖² / d + ε), d the width of the stream before slicing; the next matrices hold the norm's weights."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.width, self.epsilon = width, epsilon

    def forward(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:  # noqa: D102
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) / self.width + self.epsilon)).to(x.dtype)


class SlicedBlock(nn.Module):
    """y = a S₁ + attention(norm(a)), z = y S₂ + mlp(norm(y)), where a has k coordinates, y k' and z k''.

    It takes over the attention and feed-forward of a block, and starts as this block, with S₁ = S₂ = 1 and the norms'
    weights and biases merged into the matrices that follow them.
    """

    def __init__(self, block: Any, names: Decoder):
        super().__init__()
        self.names = names
        self.parameter_names = list(inspect.signature(block.forward).parameters)
        for half in names.halves:
            self.add_module(half, block.get_submodule(half))
        norms = [block.get_submodule(name) for name in names.norms]
        for norm, readers in zip(norms, names.readers, strict=True):
            for name in readers:
                _merge_norm_(self.get_submodule(name), norm)
        width, weight = len(norms[0].weight), norms[0].weight
        self.is_centred = isinstance(norms[0], nn.LayerNorm)
        epsilon = norms[0].eps if self.is_centred else norms[0].variance_epsilon
        self.norms = nn.ModuleList(SlicedNorm(width, epsilon) for _ in norms)
        identity = torch.eye(width, dtype=weight.dtype, device=weight.device)
        self.shortcuts = nn.ParameterList(nn.Parameter(identity.clone(), requires_grad=False) for _ in range(2))

    def attended(self, hidden: Float[Tensor, "b t k"], **others: Any) -> Float[Tensor, "b t l"]:
        """Returns what the feed-forward's norm reads."""
        attention = self.get_submodule(self.names.halves[0])
        return hidden @ self.shortcuts[0] + attention(hidden_states=self.norms[0](hidden), **others)[0]

    def forward(self, hidden: Float[Tensor, "b t d"], *args: Any, **others: Any) -> Float[Tensor, "b t l"]:
        """Takes what the original block takes; coordinates after the first k are the padding of `SlicedEmbedding`."""
        others |= dict(zip(self.parameter_names[1:], args, strict=False))
        hidden = self.attended(hidden[..., : len(self.shortcuts[0])], **others)
        return hidden @ self.shortcuts[1] + self.get_submodule(self.names.halves[1])(self.norms[1](hidden))

    def read_(self, half: int, rotation: Float[Tensor, "d k"]) -> None:
        """Makes half 0, attention, or 1, feed-forward, read k coordinates: W ← W Q, S ← Qᵀ S."""
        for layer in map(self.get_submodule, self.names.readers[half]):
            replace_matrix_(layer, weight_matrix(layer).double() @ rotation)
        self._set_shortcut(half, rotation.T @ self.shortcuts[half].double())

    def write_(self, half: int, rotation: Float[Tensor, "d k"]) -> None:
        """Makes a half write k coordinates: W ← Qᵀ W, S ← S Q."""
        layer = self.get_submodule(self.names.writers[half])
        replace_matrix_(layer, rotation.T @ weight_matrix(layer).double())
        if (bias := bias_of(layer)) is not None:
            layer.bias = nn.Parameter((rotation.T @ bias.double()).to(bias.dtype), bias.requires_grad)
        self._set_shortcut(half, self.shortcuts[half].double() @ rotation)

    def _set_shortcut(self, half: int, value: Tensor) -> None:
        self.shortcuts[half] = nn.Parameter(value.to(self.shortcuts[half].dtype), requires_grad=False)


class SlicedEmbedding(nn.Module):
    """E[ids] Q, padded with zeros to d coordinates, since GPT-2's outputs take the shape of its embeddings.

    E Q is stored as one matrix unless E is tied to the head.
    """

    def __init__(self, embedding: Any, rotation: Float[Tensor, "d k"], is_tied: bool):
        super().__init__()
        self.width, kept = len(rotation), embedding
        if not is_tied:
            weight = (embedding.weight.double() @ rotation).to(embedding.weight.dtype)
            kept = nn.Embedding.from_pretrained(weight, padding_idx=embedding.padding_idx)
        self.embedding = kept
        rotation = rotation.to(embedding.weight.dtype)
        self.rotation = nn.Parameter(rotation, requires_grad=False) if is_tied else None

    def forward(self, ids: Tensor) -> Float[Tensor, "b t d"]:  # noqa: D102
        vectors = self.embedding(ids)
        vectors = vectors if self.rotation is None else vectors @ self.rotation
        return functional.pad(vectors, (0, self.width - vectors.shape[-1]))


def obstacle(model: Any, layers: Layers) -> str | None:
    """Returns why the model's stream cannot be sliced; None if it can."""
    kind = architectures.model_type(model)
    if kind not in MODELS or not hasattr(model, "lm_head"):
        return f"{kind} is none of the decoders that are known: {', '.join(MODELS)}"
    names = MODELS[kind]
    parts = sorted({name for half in names.readers for name in half} | set(names.writers))
    blocks = range(len(model.get_submodule(names.blocks)))
    missing = [one for one in (f"{names.blocks}.{i}.{part}" for i in blocks for part in parts) if one not in layers]
    return f"{missing[0]} is not among the layers, and slicing reduces all of a block" if missing else None


def make(model: Any, batches: Sequence[Batch], layers: Layers, _: Loss, budget: float) -> CompressedModel | None:
    """Returns the model at the largest width k that fits, None if none does; at full width it is the base model."""
    limit, width = parameter_limit(model, layers, budget), model.config.hidden_size
    fitting = [k for k in range(1, width + 1) if sliced_parameters(model, k) <= limit]
    if not fitting:
        return None
    k = fitting[-1]
    new = copy.deepcopy(model) if k == width else sliced(model, batches, k)
    return CompressedModel(new, sliced_parameters(model, k))


def sliced_parameters(model: Any, k: int) -> int:
    """Returns the parameters at width k, with rotations, without the blocks' norms; the model's own at full width."""
    width, names = model.config.hidden_size, MODELS[model.config.model_type]
    if k == width:
        return parameter_count(model)
    blocks, cut = list(model.get_submodule(names.blocks)), width - k
    count = parameter_count(model) + (2 * len(blocks) - 1) * k * k + k * width
    for block in blocks:
        count -= sum(parameter_count(block.get_submodule(name)) for name in names.norms)
        count -= cut * sum(matrix_shape(block.get_submodule(name))[0] for half in names.readers for name in half)
        written = [block.get_submodule(name) for name in names.writers[: 1 if block is blocks[-1] else 2]]
        count -= cut * sum(matrix_shape(one)[1] + (bias_of(one) is not None) for one in written)
    if names.positions:
        count -= cut * len(model.get_submodule(names.positions).weight)
    return count + (k * width if _is_tied(model, names) else -cut * model.config.vocab_size)


@torch.no_grad()
def sliced(model: Any, batches: Sequence[Batch], k: int) -> Any:
    """Returns a copy whose stream has k coordinates; rotations come from the signals of the model sliced so far."""
    device, names = model_device(model), MODELS[model.config.model_type]
    with eval_mode(model):
        signals = [_entering(model, names, to_device(batch, device)) for batch in batches]
        new = copy.deepcopy(model)
        blocks = [SlicedBlock(block, names) for block in new.get_submodule(names.blocks)]
        rotation = components(signals, k, blocks[0].is_centred)
        for name in filter(None, (names.embedding, names.positions)):
            tied = name == names.embedding and _is_tied(new, names)
            new.set_submodule(name, SlicedEmbedding(new.get_submodule(name), rotation, is_tied=tied))
        for i, block in enumerate(blocks):
            new.set_submodule(f"{names.blocks}.{i}", block)
            rotation, signals = _slice_(block, signals, rotation, k, i, is_last=i == len(blocks) - 1)
    return new.train(model.training)


def _slice_(
    block: SlicedBlock, signals: Sequence[Signal], rotation: Float[Tensor, "d k"], k: int, place: int, is_last: bool
) -> tuple[Float[Tensor, "d k"], list[Signal]]:
    """Makes the block read by `rotation`; returns the rotation by which it writes, and what it wrote before."""
    block.read_(0, rotation)
    between = [(block.attended(_rotated(h, rotation), **others[place]), mask, others) for h, mask, others in signals]
    middle = components(between, k, block.is_centred)
    block.write_(0, middle)
    block.read_(1, middle)
    after = [(block(_rotated(h, rotation), **others[place]), mask, others) for h, mask, others in signals]
    if is_last:
        return rotation, after
    last = components(after, k, block.is_centred)
    block.write_(1, last)
    return last, after


def components(signals: Sequence[Signal], k: int, is_centred: bool) -> Float[Tensor, "d k"]:
    """Returns the first k eigenvectors of X Xᵀ over real tokens, by descending eigenvalue, in float64.

    `is_centred` takes the mean off each token's coordinates, and off the vectors: the last of d is 1/√d otherwise.
    """
    rows = [hidden.flatten(0, 1) if mask is None else hidden[mask] for hidden, mask, _ in signals]
    rows = [_centred(one.double()) if is_centred else one.double() for one in rows]
    moment: Any = sum(one.T @ one for one in rows)
    vectors = torch.linalg.eigh(moment).eigenvectors.flip(1)[:, :k]
    return _centred(vectors.T).T if is_centred else vectors


def _centred(rows: Float[Tensor, "t d"]) -> Float[Tensor, "t d"]:
    return rows - rows.mean(-1, keepdim=True)


def _rotated(hidden: Float[Tensor, "b t d"], rotation: Float[Tensor, "d k"]) -> Float[Tensor, "b t k"]:
    return hidden @ rotation.to(hidden.dtype)


def _entering(model: Any, names: Decoder, batch: Batch) -> Signal:
    """Returns the input of the first block and the arguments of each block, with the key-value cache disabled."""
    hidden, calls = list[Tensor](), list[dict[str, Any]]()

    def hook(block: Any, args: tuple[Tensor, ...], others: Mapping[str, Any]) -> None:
        hidden.append(args[0])
        named = dict(zip(list(inspect.signature(block.forward).parameters)[1:], args[1:], strict=False))
        calls.append({**named, **others, "past_key_values": None, "use_cache": False})

    with Hooks() as hooks:
        for block in model.get_submodule(names.blocks):
            hooks.remove_on_exit(block.register_forward_pre_hook(hook, with_kwargs=True))
        call_model(model, batch)
    return hidden[0], token_mask(batch), calls


def _is_tied(model: Any, names: Decoder) -> bool:
    return model.lm_head.weight is model.get_submodule(names.embedding).weight


def _merge_norm_(layer: nn.Module, norm: Any) -> None:
    """Merges the norm's weights γ and biases β into the layer that reads it: W ← W γ, b ← b + W β."""
    matrix = weight_matrix(layer).double()
    if isinstance(norm, nn.LayerNorm):
        assert isinstance(layer.bias, Tensor)
        bias = layer.bias + matrix @ norm.bias.double()
        layer.bias = nn.Parameter(bias.to(layer.bias.dtype), layer.bias.requires_grad)
    replace_matrix_(layer, matrix * norm.weight.double())


SLICEGPT = SizeMethod("slicegpt", "Ashkboos et al., ICLR 2024", make, obstacle)
