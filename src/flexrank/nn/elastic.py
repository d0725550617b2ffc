"""Elastic layers: one set of factors, whose prefix of any rank is a layer."""

import math

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.nn.functional import linear

from flexrank.errors import FlexrankError
from flexrank.nn.matrix import ConvGeometry


class NestedLayer(nn.Module):
    """y = U_r V_rᵀ x + b for any prefix r of k ordered components; U_rᵀ is `u[:r]` (r × m), V_rᵀ is `v[:r]` (r × n).

    Factors are stored by component, so that a prefix is one contiguous slice in memory and on disk. For T tokens the
    forward takes the cheaper of two equivalent routes: factored, T·r·(m+n) multiply-adds, or materialised, (T + r)·m·n.
    `full_matrix` is U_k V_kᵀ inside `switch.full_matrices`, else None; the forward uses it at full rank.
    """

    full_matrix: Tensor | None = None

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
        self.geometry = geometry
        self.matrix_shape = u.shape[1], v.shape[1]
        self.out_features, self.in_features = self.matrix_shape
        self._rank = len(u)

    @property
    def rank(self) -> int:
        """The active prefix r, from 1 to k."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        if not 1 <= rank <= self.max_rank:
            raise FlexrankError(f"rank {rank} is out of range; this layer has 1 to {self.max_rank}")
        self._rank = rank

    @property
    def max_rank(self) -> int:
        """The number k of components."""
        return len(self.u)

    @property
    def active(self) -> tuple[Float[Tensor, "r m"], Float[Tensor, "r n"]]:
        """U_rᵀ and V_rᵀ. At full rank they are not slices, whose gradients would be copied into full-sized ones."""
        return (self.u, self.v) if self.rank == self.max_rank else (self.u[: self.rank], self.v[: self.rank])

    @property
    def matrix(self) -> Float[Tensor, "m n"]:
        """U_r V_rᵀ at the active rank, materialised."""
        if self.full_matrix is not None and self.rank == self.max_rank:
            return self.full_matrix
        u, v = self.active
        return u.T @ v

    @property
    def weight(self) -> Tensor:
        """The matrix, of a convolution as filters (C_out, C_in, h, w), for model code that reads a layer's weight."""
        return self.geometry.filters(self.matrix) if self.geometry else self.matrix

    def is_factored_cheaper(self, tokens: int) -> bool:
        """Whether the factored route costs no more operations than the materialised one."""
        if self.full_matrix is not None and self.rank == self.max_rank:
            return False
        m, n = self.matrix_shape
        return tokens * self.rank * (m + n) <= (tokens + self.rank) * m * n

    def extra_repr(self) -> str:  # noqa: D102
        m, n = self.matrix_shape
        return f"in={n}, out={m}, rank={self.rank} of {self.max_rank}, bias={self.bias is not None}"


class NestedLinear(NestedLayer):
    """Elastic form of `nn.Linear` and of GPT-2's `Conv1D`: (…, n) → (…, m)."""

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:  # noqa: D102
        if self.is_factored_cheaper(math.prod(x.shape[:-1])):
            u, v = self.active
            return linear(linear(x, v), u.T, self.bias)
        return linear(x, self.matrix, self.bias)


class NestedConv2d(NestedLayer):
    """Elastic form of `nn.Conv2d`: V_r is a convolution with r filters, U_r one of size 1 × 1; n = C_in·h·w."""

    geometry: ConvGeometry

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        options = self.geometry[2:]  # stride, padding, dilation
        if self.is_factored_cheaper(self.geometry.positions(x)):
            u, v = self.active
            latent = functional.conv2d(x, self.geometry.filters(v), None, *options)
            return functional.conv2d(latent, u.T[:, :, None, None], self.bias)
        return functional.conv2d(x, self.weight, self.bias, *options)
