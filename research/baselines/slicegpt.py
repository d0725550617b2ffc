"""SliceGPT: the residual stream in its first principal components (Ashkboos et al., ICLR 2024).

RMSNorm without weights commutes with rotations, so the stream can have other coordinates after the embedding, each
attention and each feed-forward. There it is x Q, where Q (d × k) holds the first k principal components of the signal
X (t × d) of the model sliced so far; residual connections are multiplied by Qᵀ Q', which counts as parameters. As in
the paper's code, the last feed-forward writes all d coordinates, so the final norm and the head stay as they are. A
tied embedding is not sliced but followed by its Q (d × k): the paper's separate, sliced copy of it stores more.

Only decoders with RMSNorm are covered (`MODELS`). The paper turns LayerNorm into RMSNorm by centring what writes to the
stream, which is left out; a post-norm encoder such as BERT has no such form.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.calibrate import Hooks
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, to_device, token_mask
from research.baselines.method import CompressedModel, Layers, Loss, SizeMethod, parameter_count, parameter_limit

#: transformers' model types whose blocks are two norms, attention and feed-forward, with the names below.
MODELS = ("llama", "mistral", "qwen2", "qwen3")
READERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
WRITERS = "self_attn.o_proj", "mlp.down_proj"
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

    It starts as the original block, with S₁ = S₂ = 1 and the norms' weights merged into the matrices that follow them.
    """

    def __init__(self, block: Any):
        super().__init__()
        self.self_attn: Any = copy.deepcopy(block.self_attn)
        self.mlp = copy.deepcopy(block.mlp)
        norms = block.input_layernorm, block.post_attention_layernorm
        for norm, readers in zip(norms, READERS, strict=True):
            for name in readers:
                _set_weight(self, name, _linear(self, name).weight.double() * norm.weight.double())
        width = len(norms[0].weight)
        self.norms = nn.ModuleList(SlicedNorm(width, norm.variance_epsilon) for norm in norms)
        weight = self.self_attn.o_proj.weight
        identity = torch.eye(width, dtype=weight.dtype, device=weight.device)
        self.shortcuts = nn.ParameterList(nn.Parameter(identity.clone(), requires_grad=False) for _ in range(2))

    def attended(self, hidden: Float[Tensor, "b t k"], **others: Any) -> Float[Tensor, "b t l"]:
        """Returns what the feed-forward's norm reads."""
        return hidden @ self.shortcuts[0] + self.self_attn(hidden_states=self.norms[0](hidden), **others)[0]

    def forward(self, hidden: Float[Tensor, "b t k"], **others: Any) -> Float[Tensor, "b t l"]:  # noqa: D102
        hidden = self.attended(hidden, **others)
        return hidden @ self.shortcuts[1] + self.mlp(self.norms[1](hidden))

    def read_(self, half: int, rotation: Float[Tensor, "d k"]) -> None:
        """Makes half 0, attention, or 1, feed-forward, read k coordinates: W ← W Q, S ← Qᵀ S."""
        for name in READERS[half]:
            _set_weight(self, name, _linear(self, name).weight.double() @ rotation)
        self._set_shortcut(half, rotation.T @ self.shortcuts[half].double())

    def write_(self, half: int, rotation: Float[Tensor, "d k"]) -> None:
        """Makes a half write k coordinates: W ← Qᵀ W, S ← S Q."""
        layer = _linear(self, WRITERS[half])
        _set_weight(self, WRITERS[half], rotation.T @ layer.weight.double())
        if (bias := layer.bias) is not None:
            layer.bias = nn.Parameter((rotation.T @ bias.double()).to(layer.weight.dtype), bias.requires_grad)
        self._set_shortcut(half, self.shortcuts[half].double() @ rotation)

    def _set_shortcut(self, half: int, value: Tensor) -> None:
        self.shortcuts[half] = nn.Parameter(value.to(self.shortcuts[half].dtype), requires_grad=False)


class RotatedEmbedding(nn.Module):
    """E[ids] Q, where E is tied to the head and not sliced."""

    def __init__(self, embedding: Any, rotation: Float[Tensor, "d k"]):
        super().__init__()
        self.embedding = embedding
        self.rotation = nn.Parameter(rotation.to(embedding.weight.dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102
        return self.embedding(ids) @ self.rotation


def obstacle(model: Any, layers: Layers) -> str | None:
    """Returns why the model's stream cannot be sliced; None if it can."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in MODELS or not hasattr(model, "lm_head"):
        return f"{kind} is none of the decoders with RMSNorm that are known: {', '.join(MODELS)}"
    names = {name for half in READERS for name in half} | set(WRITERS)
    missing = [f"model.layers.{i}.{one}" for i in range(len(model.model.layers)) for one in sorted(names)]
    missing = [name for name in missing if name not in layers]
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
    width, blocks = model.config.hidden_size, list(model.model.layers)
    if k == width:
        return parameter_count(model)
    cut = width - k
    count = parameter_count(model) - 2 * width * len(blocks) + (2 * len(blocks) - 1) * k * k + k * width
    for block in blocks:
        readers = sum(block.get_submodule(name).out_features for half in READERS for name in half)
        writers = [block.get_submodule(name) for name in WRITERS]
        written = writers if block is not blocks[-1] else writers[:1]
        count -= cut * (readers + sum(one.in_features + (one.bias is not None) for one in written))
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    return count + (k * width if is_tied else -cut * model.config.vocab_size)


@torch.no_grad()
def sliced(model: Any, batches: Sequence[Batch], k: int) -> Any:
    """Returns a copy whose stream has k coordinates; rotations come from the signals of the model sliced so far."""
    new, device = copy.deepcopy(model), model_device(model)
    with eval_mode(model):
        signals = [_entering(model, to_device(batch, device)) for batch in batches]
        rotation = components(signals, k)
        new.model.embed_tokens = _embedding(new, rotation)
        for i, block in enumerate(model.model.layers):
            is_last = i == len(model.model.layers) - 1
            new.model.layers[i], rotation, signals = _sliced_block(block.eval(), signals, rotation, k, i, is_last)
    return new.train(model.training)


def _sliced_block(
    block: Any, signals: Sequence[Signal], rotation: Float[Tensor, "d k"], k: int, place: int, is_last: bool
) -> tuple[SlicedBlock, Float[Tensor, "d k"], list[Signal]]:
    """Returns the block reading by `rotation`, the rotation by which it writes, and what it writes in d coordinates."""
    new = SlicedBlock(block)
    new.read_(0, rotation)
    between = [(new.attended(_rotated(h, rotation), **others[place]), mask, others) for h, mask, others in signals]
    middle = components(between, k)
    new.write_(0, middle)
    new.read_(1, middle)
    after = [(new(_rotated(h, rotation), **others[place]), mask, others) for h, mask, others in signals]
    if is_last:
        return new, rotation, after
    last = components(after, k)
    new.write_(1, last)
    return new, last, after


def components(signals: Sequence[Signal], k: int) -> Float[Tensor, "d k"]:
    """Returns the first k eigenvectors of X Xᵀ over real tokens, uncentred, by descending eigenvalue, in float64."""
    rows = (hidden.flatten(0, 1) if mask is None else hidden[mask] for hidden, mask, _ in signals)
    moment = sum(one.double().T @ one.double() for one in rows)
    assert isinstance(moment, Tensor)
    return torch.linalg.eigh(moment).eigenvectors.flip(1)[:, :k]


def _rotated(hidden: Float[Tensor, "b t d"], rotation: Float[Tensor, "d k"]) -> Float[Tensor, "b t k"]:
    return hidden @ rotation.to(hidden.dtype)


def _entering(model: Any, batch: Batch) -> Signal:
    """Returns the input of the first block and the arguments of each block, with the key-value cache disabled."""
    hidden, calls = list[Tensor](), list[dict[str, Any]]()

    def hook(_: nn.Module, args: tuple[Tensor, ...], others: Mapping[str, Any]) -> None:
        hidden.append(args[0])
        calls.append({**others, "past_key_values": None, "use_cache": False})

    with Hooks() as hooks:
        for block in model.model.layers:
            hooks.remove_on_exit(block.register_forward_pre_hook(hook, with_kwargs=True))
        call_model(model, batch)
    return hidden[0], token_mask(batch), calls


def _embedding(model: Any, rotation: Float[Tensor, "d k"]) -> nn.Module:
    """Returns the embedding E Q, as one matrix unless the head is tied to E."""
    embedding = model.model.embed_tokens
    if model.lm_head.weight is embedding.weight:
        return RotatedEmbedding(embedding, rotation)
    weight = (embedding.weight.double() @ rotation).to(embedding.weight.dtype)
    return nn.Embedding.from_pretrained(weight, padding_idx=embedding.padding_idx)


def _linear(module: nn.Module, name: str) -> nn.Linear:
    layer = module.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


def _set_weight(module: nn.Module, name: str, weight: Float[Tensor, "m n"]) -> None:
    """Replaces a linear layer's weight by one of another shape."""
    layer = _linear(module, name)
    layer.weight = nn.Parameter(weight.to(layer.weight.dtype), layer.weight.requires_grad)
    layer.out_features, layer.in_features = weight.shape


SLICEGPT = SizeMethod("slicegpt", "Ashkboos et al., ICLR 2024", make, obstacle)
