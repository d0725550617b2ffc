"""Elastic layers: one set of factors, of which the prefix of any rank is a layer."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.nn.functional import linear

from flexrank.errors import FlexrankError
from flexrank.nn.gather import gathered, part
from flexrank.nn.matrix import ConvAttributes, ConvGeometry
from flexrank.profiles import ProfileChain


class SizeVectors(nn.Module):
    """What K sizes do not share: each size's gains of a layer's inputs and outputs, and its addition to the bias.

    In size i, of rank r, the layer's matrix is diag(outputs[i]) U_r V_rᵀ diag(inputs[i]): all merges into the factors.
    `position` is the active size's index; if it is fractional, vectors are interpolated linearly between two sizes.
    `ranks` are the layer's ranks in the sizes, smallest size first; several may be equal.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        inputs: Float[Tensor, "K n"],
        outputs: Float[Tensor, "K m"],
        bias: Float[Tensor, "K m"] | None,
    ):
        super().__init__()
        self.ranks, self.position = list(ranks), float(len(ranks) - 1)
        self.inputs, self.outputs = Parameter(inputs), Parameter(outputs)
        self.bias = None if bias is None else Parameter(bias)

    def active(self, vectors: Float[Tensor, "K d"]) -> Float[Tensor, " d"]:
        """The active size's vector of `inputs`, `outputs` or `bias`."""
        low = int(self.position)
        share = self.position - low
        return torch.lerp(vectors[low], vectors[low + 1], share) if share else vectors[low]

    def position_of(self, rank: int) -> float:
        """The index of the smallest size of at least this rank, or of the largest size if there is none."""
        return next((float(index) for index, own in enumerate(self.ranks) if own >= rank), float(len(self.ranks) - 1))


class NestedLayer(nn.Module):
    """y = U_r V_rᵀ x + b for any prefix r of k ordered components; U_rᵀ is `u[:r]` (r × m), V_rᵀ is `v[:r]` (r × n).

    Factors are stored by component, so that a prefix is one contiguous slice in memory and on disk. For T tokens the
    forward takes the cheaper of two equivalent routes: factored, T·r·(m+n) multiply-adds, or materialised, (T + r)·m·n.
    Consolidation adds what sizes do not share: `sizes`, vectors that are applied to matrix and bias, and `dense`
    (m × n), which replaces the factors' product at full rank min(m, n); ranks between k and full need not exist.
    Setting `rank` directly selects the vectors of the smallest size of at least that rank; `switch.set_profile` selects
    those of the exact size.
    The vectors are float32 if the factors are in half precision; `dense` may have the base model's dtype.
    `full_matrix` is the matrix at full rank inside `switch.full_matrices`, otherwise None; the forward uses it there.
    If `is_sharded`, then `u`, `v` and `dense` are this process's parts, gathered where they are used
    (`sharding.shard_`); `gathers` counts the gathers.
    `chain` is that of the artefact from which the model was loaded, for `switch.set_budget`; `card_sizes` is what that
    artefact's model card says about sizes, for the cards of deployed models.
    """

    full_matrix: Tensor | None = None
    is_sharded = False
    gathers = 0
    chain: ProfileChain | None = None
    card_sizes = ""

    def __init__(
        self,
        u: Float[Tensor, "k m"],
        v: Float[Tensor, "k n"],
        bias: Float[Tensor, " m"] | None = None,
        geometry: ConvGeometry | None = None,
    ):
        super().__init__()
        self.u, self.v = Parameter(u), Parameter(v)
        self.bias = None if bias is None else Parameter(bias)
        self.sizes: SizeVectors | None = None
        self.dense: Parameter | None = None
        self.geometry = geometry
        self.matrix_shape = u.shape[1], v.shape[1]
        self.out_features, self.in_features = self.matrix_shape
        self._rank = len(u)

    @property
    def rank(self) -> int:
        """The active rank r: from 1 to k, or full."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        if not self.has_rank(rank):
            raise FlexrankError(f"rank {rank} is out of range; this layer has {self.ranks}")
        self._rank = rank
        if self.sizes is not None:
            self.sizes.position = self.sizes.position_of(rank)

    @property
    def max_rank(self) -> int:
        """The full rank: the number k of components, or min(m, n) if the layer has `dense`."""
        return len(self.u) if self.dense is None else min(self.matrix_shape)

    @property
    def ranks(self) -> str:
        """The layer's ranks, in words."""
        return f"1 to {len(self.u)}" + (f", and {self.max_rank}" if self.max_rank > len(self.u) else "")

    def has_rank(self, rank: int) -> bool:
        """Whether the layer has a prefix of this rank, or `dense` for it."""
        return 1 <= rank <= len(self.u) or rank == self.max_rank

    @property
    def is_full(self) -> bool:
        """Whether the active rank is the full one."""
        return self.rank == self.max_rank

    def is_dense_at(self, rank: int) -> bool:
        """Whether the matrix of this rank is `dense` rather than a product of factors."""
        return self.dense is not None and rank == self.max_rank

    def shard_dims(self) -> dict[str, tuple[int, int]]:
        """For each parameter that may be sharded, the dimension it is sharded along and its full size there."""
        m, n = self.matrix_shape
        return {"u": (1, m), "v": (1, n)} | ({} if self.dense is None else {"dense": (0, m)})

    def whole(self, name: str, rank: int | None = None) -> Tensor:
        """`u` or `v` up to a rank, or `dense`; a sharded layer gathers it, so all processes must call this.

        Complete factors are not sliced, because the gradient of a slice is copied into a full-sized one.
        """
        own: Tensor = getattr(self, name)
        own = own if rank in (None, len(own)) else own[:rank]
        if not self.is_sharded:
            return own
        self.gathers += 1
        return gathered(own, *self.shard_dims()[name])

    @property
    def active(self) -> tuple[Float[Tensor, "r m"], Float[Tensor, "r n"]]:
        """U_rᵀ and V_rᵀ at the active rank, with the gains of the active size."""
        u, v = self.whole("u", self.rank), self.whole("v", self.rank)
        if self.sizes is None:
            return u, v
        outputs, inputs = self.sizes.active(self.sizes.outputs), self.sizes.active(self.sizes.inputs)
        return u * outputs.to(u.dtype), v * inputs.to(v.dtype)

    @property
    def active_bias(self) -> Float[Tensor, " m"] | None:
        """The bias of the active size."""
        if self.bias is None or self.sizes is None or self.sizes.bias is None:
            return self.bias
        return self.bias + self.sizes.active(self.sizes.bias).to(self.bias.dtype)

    @torch.no_grad()
    def set_dense_(self) -> None:
        """Gives full rank a separate matrix, which starts as the product of the factors."""
        product = (self.whole("u").T.double() @ self.whole("v").double()).to(self.u.dtype)
        own = part(product, 0).clone() if self.is_sharded else product
        self.dense = Parameter(own, self.u.requires_grad)

    @torch.no_grad()
    def set_sizes_(self, ranks: Sequence[int], rows: Sequence[tuple[Tensor, Tensor, Tensor]] | None = None) -> None:
        """Gives the layer vectors for sizes of these ranks: one of `rows` each, or by default the active vectors."""
        rows = [self.active_vectors] * len(ranks) if rows is None else rows
        inputs, outputs, bias = (torch.stack(vectors) for vectors in zip(*rows, strict=True))
        self.sizes = SizeVectors(ranks, inputs, outputs, None if self.bias is None else bias)
        self.sizes.requires_grad_(self.u.requires_grad).train(self.training)
        self.sizes.position = self.sizes.position_of(self.rank)
        self.card_sizes = ""  # consolidation begins, which makes earlier measurements obsolete

    @property
    def active_vectors(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " m"], Float[Tensor, " m"]]:
        """The active size's gains of inputs and of outputs, and its addition to the bias."""
        m, n = self.matrix_shape
        dtype = torch.promote_types(self.u.dtype, torch.float32)  # bfloat16 has only 128 numbers from 1 to 2
        zeros = self.u.new_zeros(m, dtype=dtype)
        if self.sizes is None:
            return self.v.new_ones(n, dtype=dtype), zeros + 1, zeros
        bias = zeros if self.sizes.bias is None else self.sizes.active(self.sizes.bias)
        return self.sizes.active(self.sizes.inputs), self.sizes.active(self.sizes.outputs), bias

    @property
    def matrix(self) -> Float[Tensor, "m n"]:
        """The matrix at the active rank, materialised."""
        if self.full_matrix is not None and self.is_full:
            return self.full_matrix
        return self.matrix_in(None)

    def matrix_in(self, dtype: torch.dtype | None) -> Float[Tensor, "m n"]:
        """U_r V_rᵀ, or `dense` if it exists and the rank is full, with the active size's gains, computed in `dtype`."""
        if not self.is_dense_at(self.rank):
            u, v = (factor.to(dtype or factor.dtype) for factor in self.active)
            return u.T @ v
        dense, sizes = self.whole("dense").to(dtype or self.u.dtype), self.sizes
        if sizes is None:
            return dense
        outputs, inputs = sizes.active(sizes.outputs), sizes.active(sizes.inputs)
        return outputs.to(dense.dtype)[:, None] * dense * inputs.to(dense.dtype)

    @property
    def weight(self) -> Tensor:
        """The matrix, or a convolution's filters (C_out, C_in, h, w), for model code that reads a layer's weight."""
        return self.geometry.filters(self.matrix) if self.geometry else self.matrix

    def is_factored_cheaper(self, tokens: int) -> bool:
        """Whether the factored route costs no more operations than the materialised one.

        Compiled code takes the route for many tokens, whatever their number: it has one graph for each size.
        """
        if self.is_full and not (self.dense is None and self.full_matrix is None):
            return False
        m, n = self.matrix_shape
        if torch.compiler.is_compiling():
            return self.rank * (m + n) <= m * n
        return tokens * self.rank * (m + n) <= (tokens + self.rank) * m * n

    def extra_repr(self) -> str:  # noqa: D102
        m, n = self.matrix_shape
        return f"in={n}, out={m}, rank={self.rank} of {self.max_rank}, bias={self.bias is not None}"


class NestedLinear(NestedLayer):
    """Elastic form of `nn.Linear` and of GPT-2's `Conv1D`: (…, n) → (…, m)."""

    # The argument has the name that it has in torch, for code that gives it by name.
    def forward(self, input: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:  # noqa: D102
        if self.is_factored_cheaper(math.prod(input.shape[:-1])):
            u, v = self.active
            return linear(linear(input, v), u.T, self.active_bias)
        if self.sizes is not None and self.full_matrix is None and self.is_dense_at(self.rank):
            return self._scaled(input, self.whole("dense"), self.sizes)
        return linear(input, self.matrix, self.active_bias)

    def _scaled(self, x: Tensor, dense: Tensor, sizes: SizeVectors) -> Tensor:
        """The product with `dense`, with gains applied to the activations.

        Gains applied to the matrix need its gradient, one more product of T·m·n: a quarter of a training step's time.
        """
        if not torch.is_autocast_enabled(x.device.type):  # autocast casts both
            dense = dense.to(x.dtype)
        y = linear(x * sizes.active(sizes.inputs).to(x.dtype), dense)
        outputs, bias = sizes.active(sizes.outputs).to(y.dtype), self.active_bias
        return y * outputs if bias is None else torch.addcmul(bias.to(y.dtype), y, outputs)


class NestedConv2d(ConvAttributes, NestedLayer):
    """Elastic form of `nn.Conv2d`: V_r is a convolution with r filters, U_r one of size 1 × 1; n = C_in·h·w."""

    geometry: ConvGeometry

    def forward(self, input: Tensor) -> Tensor:  # noqa: D102
        options = self.geometry[2:]  # stride, padding, dilation
        if self.is_factored_cheaper(self.geometry.positions(input)):
            u, v = self.active
            latent = functional.conv2d(input, self.geometry.filters(v), None, *options)
            return functional.conv2d(latent, u.T[:, :, None, None], self.active_bias)
        return functional.conv2d(input, self.weight, self.active_bias, *options)
