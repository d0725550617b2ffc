"""A³: fewer dimensions inside heads, fewer channels inside feed-forwards (Wong et al., 2025).

Each of a block's three parts is approximated separately, from the base model's activations:

    QK   the scores qᵀk of a head, with fewer dimensions of q and k: `score_maps`; with rotary positions `score_pairs`
    OV   what the group of heads sharing a value adds to the stream, with fewer dimensions of that value: `value_maps`
    MLP  the output of the down projection, from fewer channels: `channels`, and the down projection is refitted

A smaller matrix takes the place of each. Attention modules hold one head size for q, k and v, and rotate pairs by
their position in the head, so here the removed rows of q, k and v and columns of o are zeros in the old shapes, and
`CompressedModel.parameters` counts them as removed. As for every method, indices (which pairs of a head remain) are not
counted.

Written from what is known of the paper and not checked against its code: the results are of this form, and the authors'
may be better. Known from it: the three parts; that with rotary positions pairs are chosen by the products of the norms
of their columns, as channels are; that grouped heads have one joint SVD for their value. Uncertain, and chosen here: a
pair's norm covers both its dimensions, and for q all heads of a group; the joint SVD takes the mean second moment of
the group's heads; attention's sizes come from one uniform share, rounded up (rounding to the nearest was no better on
stories260k), and channels take the rest of the budget.
"""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from flexrank.data.batches import Batch
from flexrank.nn.blocks import block_stack
from flexrank.nn.matrix import bias_of, matrix_shape, weight_matrix
from research.baselines import method, svd_llm
from research.baselines.architectures import BERT, GPT2, LLAMA, VIT, Names, model_type
from research.baselines.method import (
    CompressedModel,
    Layers,
    Loss,
    SizeMethod,
    invertible,
    parameter_limit,
    replace_matrix_,
)
from research.baselines.statistics import input_moments, output_moments

#: By transformers' model type. Heads of other models have norms (Qwen3), or their gates are fused (Phi-3).
MODELS = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "bert": BERT, "gpt2": GPT2, "vit": VIT}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of one model: dimensions of q and k, dimensions of v, and channels."""

    score: int
    value: int
    channels: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a model's blocks."""

    names: Names
    blocks: tuple[str, ...]
    heads: int
    groups: int  #: heads of keys and values
    head_size: int
    channels: int

    def rows(self, part: int, head: int) -> slice:
        """Returns the rows of a head of q (part 0), k (1) or v (2) in the matrix that holds them."""
        start = self.names.is_fused * part * self.heads * self.head_size + head * self.head_size
        return slice(start, start + self.head_size)

    def full(self) -> Sizes:
        """Returns the sizes with nothing reduced."""
        return Sizes(self.head_size, self.head_size, self.channels)

    def removed(self, model: Any, sizes: Sizes) -> int:
        """Returns the number of parameters, biases included, that the model loses at these sizes."""
        count, names = 0, self.names
        score, value = self.head_size - sizes.score, self.head_size - sizes.value
        for block in map(model.get_submodule, self.blocks):
            channels = self.channels - sizes.channels
            rows = [(names.query, self.heads * score), (names.key, self.groups * score)]
            rows += [(names.value, self.groups * value), *((name, channels) for name in names.ups)]
            for name, cut in rows:
                layer = block.get_submodule(name)
                count += cut * (matrix_shape(layer)[1] + (layer.bias is not None))
            for name, cut in ((names.output, self.heads * value), (names.down, channels)):
                count += cut * matrix_shape(block.get_submodule(name))[0]
        return count


def obstacle(model: nn.Module, layers: Layers) -> str | None:
    """Returns why the method does not apply: an unknown model, or a block only partly in `layers`. None if it does."""
    if (kind := model_type(model)) not in MODELS:
        return f"{kind} is none of the models whose heads are known: {', '.join(MODELS)}"
    stack = block_stack(model, layers)
    missing = [f"{block}.{name}" for block, _ in stack for name in MODELS[kind].all if f"{block}.{name}" not in layers]
    return f"{missing[0]} is not among the layers, and all of a block is reduced" if missing else None


def shape_of(model: Any, layers: Layers) -> Shape:
    """Returns the shape of the blocks of a model that has no `obstacle`."""
    config, names = model.config, MODELS[model.config.model_type]
    blocks = tuple(name for name, _ in block_stack(model, layers))
    heads = config.num_attention_heads
    size = matrix_shape(layers[f"{blocks[0]}.{names.output}"])[1] // heads
    keys, channels = (matrix_shape(layers[f"{blocks[0]}.{one}"])[0] for one in (names.key, names.ups[0]))
    return Shape(names, blocks, heads, heads if names.is_fused else keys // size, size, channels)


def sizes_of(model: Any, layers: Layers, shape: Shape, budget: float) -> Sizes | None:
    """Returns the sizes at a budget; None if it leaves less than one channel for each block.

    Attention's sizes are the share of the blocks' parameters within the budget, rounded up; channels take the rest.
    """
    others = {name: one for name, one in layers.items() if not name.startswith(tuple(f"{b}." for b in shape.blocks))}
    outside, dense = method.dense_count(others), method.dense_count(layers)
    share, unit = (budget * dense - outside) / (dense - outside), 2 if shape.names.is_rotary else 1
    score = unit * max(1, math.ceil(share * shape.head_size / unit))
    value, limit = max(1, math.ceil(share * shape.head_size)), parameter_limit(model, layers, budget)
    spare = limit - method.parameter_count(model) + shape.removed(model, Sizes(score, value, 0))
    each = shape.removed(model, dataclasses.replace(shape.full(), channels=shape.channels - 1))
    if spare < each:
        return None
    return Sizes(score, value, min(shape.channels, spare // each))


@torch.no_grad()
def make(model: Any, batches: Sequence[Batch], layers: Layers, loss: Loss, budget: float) -> CompressedModel | None:
    """Returns the model with every block's parts at the same sizes; None if the budget has no room for any."""
    shape, new = shape_of(model, layers), copy.deepcopy(model)
    sizes, names = sizes_of(model, layers, shape, budget), shape.names
    if sizes is None:
        return None

    def named(*own: str) -> Layers:
        return {name: layers[name] for block in shape.blocks for name in (f"{block}.{one}" for one in own)}

    moments = input_moments(model, batches, named(names.output, names.down), loss) | output_moments(
        model, batches, named(names.query, names.key)
    )
    for block in shape.blocks:
        device, start = model.device, f"{block}."
        own = {name.removeprefix(start): one.to(device) for name, one in moments.items() if name.startswith(start)}
        reduce_(new.get_submodule(block), own, shape, sizes)
    return CompressedModel(new, method.parameter_count(model) - shape.removed(model, sizes))


def reduce_(block: Any, moments: Mapping[str, Tensor], shape: Shape, sizes: Sizes) -> None:
    """Reduces all three parts of a block in place; moments are of what q and k return and of what o and down read."""
    names, size, share = shape.names, shape.head_size, shape.heads // shape.groups
    query, key, value, output = (
        block.get_submodule(one) for one in (names.query, names.key, names.value, names.output)
    )
    matrix = weight_matrix(output)
    for group in range(shape.groups):
        heads, own = range(group * share, (group + 1) * share), shape.rows(1, group)
        asked = [shape.rows(0, head) for head in heads]
        queries = torch.stack([moments[names.query][one, one] for one in asked]).sum(0)
        choose = score_pairs if names.is_rotary else score_maps
        transforms = choose(queries, moments[names.key][own, own], sizes.score)
        for one in asked:
            _transform_rows(query, one, transforms[0])
        _transform_rows(key, own, transforms[1])
        columns = [slice(head * size, (head + 1) * size) for head in heads]
        read = torch.stack([moments[names.output][one, one] for one in columns]).mean(0)
        u, v = value_maps(torch.cat([matrix[:, one].double() for one in columns]), read, sizes.value)
        _transform_rows(value, shape.rows(2, group), v)
        for one, part in zip(columns, u.chunk(share), strict=True):
            matrix[:, one] = _padded(part.T, size).T.to(matrix.dtype)
    _narrow(block, names, moments[names.down], sizes.channels)


def score_maps(
    queries: Float[Tensor, "d d"], keys: Float[Tensor, "d d"], rank: int
) -> tuple[Float[Tensor, "r d"], Float[Tensor, "r d"]]:
    """Returns A and B of the least E (qᵀk − (A q)ᵀ(B k))² over all pairs of query and key, from E q qᵀ and E k kᵀ.

    With C_q = S Sᵀ, C_k = T Tᵀ and Sᵀ T = P Λ Q, Aᵀ B = S⁻ᵀ P_r Λ_r Q_r T⁻¹. The moments get a ridge. A model whose
    heads share keys needs `score_pairs`, unless each group is one head.
    """
    left, right = (torch.linalg.cholesky(invertible(one)) for one in (queries, keys))
    own, values, other = torch.linalg.svd(left.T @ right)
    root = values[:rank, None].sqrt()
    first = torch.linalg.solve_triangular(left.T, own[:, :rank], upper=True).T
    return root * first, root * torch.linalg.solve_triangular(right, other[:rank], upper=False, left=False)


def score_pairs(
    queries: Float[Tensor, "d d"], keys: Float[Tensor, "d d"], rank: int
) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d d"]]:
    """Returns one 0/1 diagonal twice: the r/2 pairs (i, i + d/2) with the largest √E‖q_pair‖² · √E‖k_pair‖².

    Rotary positions rotate within a pair, so they commute with both factors.
    """
    powers = [one.diagonal().unflatten(0, (2, -1)).sum(0) for one in (queries, keys)]
    kept = queries.new_zeros(len(powers[0]))
    kept[(powers[0] * powers[1]).topk(rank // 2).indices] = 1
    chosen = torch.cat((kept, kept)).diag()
    return chosen, chosen


def value_maps(
    weights: Float[Tensor, "m d"], read: Float[Tensor, "d d"], rank: int
) -> tuple[Float[Tensor, "m r"], Float[Tensor, "r d"]]:
    """Returns U and V of the least E ‖W z − U V z‖², z attention's output of a value, W the heads' stacked outputs.

    z is attention's weighted mean of values, so V can be merged into the value projection. With the second moment P of
    mean inputs, by which the paper weights W_v W_o, E z zᵀ is W_v P W_vᵀ. SVD-LLM's factors are this optimum.
    """
    factors = svd_llm.factors(weights, read)
    return factors.u[:rank].T, factors.v[:rank]


def channels(down: Float[Tensor, "m i"], read: Float[Tensor, "i i"], count: int) -> Int[Tensor, " c"]:
    """Returns the indices, ascending, of the channels with the largest √E x² · ‖W_down's column‖."""
    return (read.diagonal() * down.double().square().sum(0)).topk(count).indices.sort().values


def refitted(down: Float[Tensor, "m i"], read: Float[Tensor, "i i"], kept: Int[Tensor, " c"]) -> Float[Tensor, "m c"]:
    """Returns the M of the least E ‖W x − M x_kept‖²: W C[:, kept] C[kept, kept]⁻¹, where C gets a ridge."""
    moment = invertible(read)
    return torch.linalg.solve(moment[kept][:, kept], down.double() @ moment[:, kept], left=False)


def _transform_rows(layer: nn.Module, rows: slice, transform: Float[Tensor, "r d"]) -> None:
    """Replaces these outputs y by A y, padded with zeros."""
    transform = _padded(transform, transform.shape[1])
    for values in (weight_matrix(layer), bias_of(layer)):
        if values is not None:
            values[rows] = (transform @ values[rows].double()).to(values.dtype)


def _padded(matrix: Float[Tensor, "r d"], rows: int) -> Float[Tensor, "rows d"]:
    return torch.cat((matrix, matrix.new_zeros(rows - len(matrix), matrix.shape[1])))


def _narrow(block: Any, names: Names, read: Float[Tensor, "i i"], count: int) -> None:
    """Keeps `count` channels of the feed-forward, whose matrices become smaller."""
    down = block.get_submodule(names.down)
    kept = channels(weight_matrix(down), read, count)
    for name in names.ups:
        up = block.get_submodule(name)
        replace_matrix_(up, weight_matrix(up)[kept])
        if up.bias is not None:
            up.bias = nn.Parameter(up.bias[kept], up.bias.requires_grad)
    replace_matrix_(down, refitted(weight_matrix(down), read, kept))


A3 = SizeMethod("a3", "Wong et al., 2025", make, obstacle)
