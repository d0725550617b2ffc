"""Elastic and deployed layers: forwards only. Who builds them from what is elsewhere (surgery, deployment)."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn import Linear, Parameter, functional
from torch.nn.functional import linear
from torch.nn.modules import module as hooks

from flexrank.errors import FlexrankError
from flexrank.nn.linalg import choose_slack, gauge_align
from flexrank.nn.matrix import ConvGeometry
from flexrank.profiles.costs import whole_slack

Slack = int | Literal["auto"]
#: Up to an output of so many numbers concatenating is quicker than writing in place, whose views cost more than a copy.
FEW_OUTPUTS = 2**17


class NestedLayer(nn.Module):
    """y = U_r V_rᵀ x + b for any prefix r of k ordered components; U_rᵀ is `u[:r]` (r × m), V_rᵀ is `v[:r]` (r × n).

    Component-major storage makes a prefix one contiguous slice, in memory and on disk. The forward takes the cheaper
    of two equal routes for T tokens: factored, T·r·(m+n) multiply-adds, or materialised, (T + r)·m·n.

    Attributes:
        u: parameter (k, m).
        v: parameter (k, n).
        bias: parameter (m,), or None.
        rank: the active prefix r, from 1 to k.
        full_matrix: U_k V_kᵀ (m, n) where `surgery.full_matrices` keeps it: then full rank multiplies by it.
    """

    geometry: ConvGeometry | None = None
    full_matrix: Tensor | None = None

    def __init__(self, u: Float[Tensor, "k m"], v: Float[Tensor, "k n"], bias: Float[Tensor, " m"] | None = None):
        super().__init__()
        self.u = Parameter(u)
        self.v = Parameter(v)
        self.bias = None if bias is None else Parameter(bias)
        self._rank = u.shape[0]

    @property
    def rank(self) -> int:
        """The active prefix."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        if not 1 <= rank <= self.max_rank:
            raise FlexrankError(f"rank {rank} is out of range; this layer has 1 to {self.max_rank}")
        self._rank = rank

    @property
    def max_rank(self) -> int:
        """k, the number of components held."""
        return self.u.shape[0]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(m, n)."""
        return self.u.shape[1], self.v.shape[1]

    @property
    def active(self) -> tuple[Float[Tensor, "r m"], Float[Tensor, "r n"]]:
        """U_rᵀ and V_rᵀ. At full rank they are no slices, whose gradients would be copied into ones of full size."""
        return (self.u, self.v) if self.rank == self.max_rank else (self.u[: self.rank], self.v[: self.rank])

    @property
    def matrix(self) -> Float[Tensor, "m n"]:
        """U_r V_rᵀ at the active rank, materialised."""
        if self.full_matrix is not None and self.rank == self.max_rank:
            return self.full_matrix
        u, v = self.active
        return u.T @ v

    def is_factored_cheaper(self, tokens: int) -> bool:
        """Whether T·r·(m+n) <= (T + r)·m·n, so that the factored route costs no more operations."""
        if self.full_matrix is not None and self.rank == self.max_rank:
            return False
        m, n = self.matrix_shape
        return tokens * self.rank * (m + n) <= (tokens + self.rank) * m * n

    def extra_repr(self) -> str:  # noqa: D102
        m, n = self.matrix_shape
        return f"in={n}, out={m}, rank={self.rank} of {self.max_rank}, bias={self.bias is not None}"


class NestedLinear(NestedLayer):
    """Elastic form of `nn.Linear` and of GPT-2's `Conv1D`: (…, n) → (…, m)."""

    @property
    def in_features(self) -> int:
        """Inputs n."""
        return self.v.shape[1]

    @property
    def out_features(self) -> int:
        """Outputs m."""
        return self.u.shape[1]

    @property
    def weight(self) -> Tensor:
        """The materialised matrix (m, n), for model code that reads a Linear's weight."""
        return self.matrix

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:  # noqa: D102
        if self.is_factored_cheaper(math.prod(x.shape[:-1])):
            u, v = self.active
            return linear(linear(x, v), u.T, self.bias)
        return linear(x, self.matrix, self.bias)


class NestedConv2d(NestedLayer):
    """Elastic form of `nn.Conv2d`: V_r is a convolution of r filters, U_r a 1 × 1 one; n = C_in·h·w."""

    geometry: ConvGeometry

    def __init__(self, u: Tensor, v: Tensor, bias: Tensor | None, geometry: ConvGeometry):
        super().__init__(u, v, bias)
        self.geometry = geometry

    @property
    def weight(self) -> Tensor:
        """The materialised filters (C_out, C_in, h, w)."""
        return self.matrix.unflatten(1, (self.geometry.in_channels, *self.geometry.kernel_size))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        geometry = self.geometry
        where = (geometry.stride, geometry.padding, geometry.dilation)
        if self.is_factored_cheaper(_positions(x, geometry)):
            u, v = self.active
            filters = v.unflatten(1, (geometry.in_channels, *geometry.kernel_size))
            latent = functional.conv2d(x, filters, None, *where)
            return functional.conv2d(latent, u.T[:, :, None, None], self.bias)
        return functional.conv2d(x, self.weight, self.bias, *where)


class GaugeAlignedLayer(nn.Module):
    """y = [z_{1:g}; Û z] + b, with z = Ṽᵀx: rank r, of which the first g = r − slack outputs are latents themselves.

    Stores r·(m+n−g) parameters (FlexRank, eq. 7, is g = r). `latent` holds Ṽᵀ and `expand` Û with the bias of the
    outputs after g; both are plain torch layers, so that adapters and quantisers find them by name. `bias` is that of
    the first g outputs. g = 0 is plain U Vᵀ.

    The empty buffer `weight` makes a loader that does not know this layer fail on its shape, where it would
    otherwise leave a freshly initialised matrix in its place.
    """

    latent: nn.Module
    expand: nn.Module
    bias: Parameter | None
    weight: Tensor

    def __init__(self, shape: tuple[int, int], rank: int, aligned: int, *, bias: bool, device: Any, dtype: Any):
        super().__init__()
        m, n = shape
        if not (1 <= rank <= min(m, n) and 0 <= aligned <= rank and aligned < m):
            raise FlexrankError(f"rank {rank} with {aligned} aligned outputs does not fit a {m} x {n} matrix")
        self.matrix_shape, self.rank, self.aligned = shape, rank, aligned
        head = Parameter(torch.zeros(aligned, device=device, dtype=dtype)) if bias and aligned else None
        self.register_parameter("bias", head)
        self.register_buffer("weight", torch.empty(0, device=device, dtype=dtype))

    @property
    def slack(self) -> int:
        """Columns left unaligned, r − g."""
        return self.rank - self.aligned

    @torch.no_grad()
    def _fill(self, u: Tensor, v: Tensor, bias: Tensor | None) -> None:
        u_hat, v_tilde = gauge_align(u, v, self.slack)
        if not bool(torch.isfinite(u_hat).all()):
            raise FlexrankError(f"the leading {self.aligned} rows of U are singular; give more slack than {self.slack}")
        for layer, matrix in ((self.latent, v_tilde.T), (self.expand, u_hat)):
            assert isinstance(layer.weight, Tensor)
            layer.weight.copy_(matrix.reshape(layer.weight.shape))
            if not bool(torch.isfinite(layer.weight).all()):
                mend = f"give more than {self.slack} slack" if self.aligned else "choose another dtype"
                raise FlexrankError(f"the factors overflow {layer.weight.dtype}; {mend}")
        if bias is not None:
            assert isinstance(self.expand.bias, Tensor)
            self.expand.bias.copy_(bias[self.aligned :])
            if self.bias is not None:
                self.bias.copy_(bias[: self.aligned])

    def extra_repr(self) -> str:  # noqa: D102
        m, n = self.matrix_shape
        return f"in={n}, out={m}, rank={self.rank}, aligned={self.aligned}"


class GaugeAlignedLinear(GaugeAlignedLayer):
    """The deployed linear layer: (…, n) → (…, m)."""

    def __init__(
        self, shape: tuple[int, int], rank: int, aligned: int, *, bias: bool, device: Any = None, dtype: Any = None
    ):
        super().__init__(shape, rank, aligned, bias=bias, device=device, dtype=dtype)
        self.out_features, self.in_features = shape
        self.latent = Linear(shape[1], rank, bias=False, device=device, dtype=dtype)
        self.expand = Linear(rank, shape[0] - aligned, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_factors(
        cls,
        u: Float[Tensor, "m r"],
        v: Float[Tensor, "n r"],
        bias: Float[Tensor, " m"] | None = None,
        *,
        slack: Slack = "auto",
        dtype: torch.dtype | None = None,
        inputs: Float[Tensor, "t n"] | None = None,
    ) -> "GaugeAlignedLinear":
        """The layer for y = U Vᵀ x + b.

        Args:
            u: (m, r).
            v: (n, r).
            bias: (m,).
            slack: 0 is the paper's form, r plain U Vᵀ; "auto" takes the least within the dtype's stated error bound.
                At r = m at least one: with m outputs aligned nothing would be left but the dense matrix.
            dtype: of the layer; u's by default.
            inputs: (t, n) activations the error is measured on; standard normal ones by default.

        Raises:
            FlexrankError: a slack out of range, or too small for a singular leading block of U.
        """
        aligned = min(u.shape[1] - resolve_slack(u, v, slack, dtype or u.dtype, inputs), u.shape[0] - 1)
        shape = (u.shape[0], v.shape[0])
        layer = cls(shape, u.shape[1], aligned, bias=bias is not None, device=u.device, dtype=dtype or u.dtype)
        layer._fill(u, v, bias)
        return layer

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:  # noqa: D102
        weights = self._plain_weights()
        if weights is None:
            latent = self.latent(x)
            rest = self.expand(latent)
            return self._joined(latent, self.bias, rest) if self.aligned else rest
        v_tilde, u_hat, head_bias, bias = weights
        latent = linear(x, v_tilde)
        if self.aligned == 0:
            return linear(latent, u_hat, bias)
        is_small = type(x) is not Tensor or x.numel() * self.out_features <= FEW_OUTPUTS * self.in_features
        if is_small or not _are_plain(x, latent, v_tilde, u_hat):
            return self._joined(latent, head_bias, linear(latent, u_hat, bias))
        output = self._write_in_place(latent.view(-1, self.rank), head_bias, u_hat, bias)
        return output.view(*x.shape[:-1], self.out_features)

    def _plain_weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
        """Ṽᵀ, Û and both parts' biases where calling the children would do no more than `linear`: no adapter, no hook.

        Calling both as modules, and reading them by `nn.Module.__getattr__`, would take longer than their products
        with one token do. What this reads has left the processor's caches since the layer's last call: each further
        object costs, and asking for autocast more than all the rest.
        """
        if is_grad_enabled() or is_compiling():
            return None
        modules, own = self._modules, self._parameters
        latent, expand = modules["latent"], modules["expand"]
        if type(latent) is not Linear or type(expand) is not Linear:
            return None
        if latent._forward_hooks or expand._forward_hooks or hooks._global_forward_hooks:
            return None
        if latent._forward_pre_hooks or expand._forward_pre_hooks or hooks._global_forward_pre_hooks:
            return None
        if "forward" in latent.__dict__ or "forward" in expand.__dict__:
            return None
        of_latent, of_expand = latent._parameters, expand._parameters
        v_tilde, u_hat = of_latent.get("weight"), of_expand.get("weight")  # pruning and sharding take them away
        if v_tilde is None or u_hat is None or of_latent.get("bias") is not None:
            return None
        if "bias" not in own or "bias" not in of_expand:
            return None
        return v_tilde, u_hat, own["bias"], of_expand["bias"]

    def _joined(
        self, latent: Float[Tensor, "*batch r"], bias: Tensor | None, rest: Float[Tensor, "*batch k"]
    ) -> Float[Tensor, "*batch m"]:
        head = latent.narrow(-1, 0, self.aligned)
        # Under autocast the latents have another dtype than the bias.
        return torch.cat((head if bias is None else head + bias.to(latent.dtype), rest), -1)

    def _write_in_place(
        self, latent: Float[Tensor, "t r"], head_bias: Tensor | None, u_hat: Float[Tensor, "k r"], bias: Tensor | None
    ) -> Float[Tensor, "t m"]:
        """Both parts go straight into one output; concatenating them costs 2 to 9 % more on a CPU."""
        output = latent.new_empty(len(latent), self.out_features)
        head, rest = output.split_with_sizes((self.aligned, self.out_features - self.aligned), 1)
        kept = latent.narrow(1, 0, self.aligned)
        if head_bias is None:
            head.copy_(kept)
        else:
            torch.add(kept, head_bias, out=head)
        if bias is None:
            torch.mm(latent, u_hat.T, out=rest)
        else:
            torch.addmm(bias, latent, u_hat.T, out=rest)
        return output


class GaugeAlignedConv2d(GaugeAlignedLayer):
    """The deployed convolution: `latent` has r filters, `expand` is 1 × 1."""

    def __init__(
        self,
        shape: tuple[int, int],
        rank: int,
        aligned: int,
        geometry: ConvGeometry,
        *,
        bias: bool,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__(shape, rank, aligned, bias=bias, device=device, dtype=dtype)
        self.geometry = geometry
        self.latent = convolution(geometry, rank, bias=False, device=device, dtype=dtype)
        self.expand = nn.Conv2d(rank, shape[0] - aligned, 1, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_factors(
        cls,
        u: Tensor,
        v: Tensor,
        bias: Tensor | None,
        geometry: ConvGeometry,
        *,
        slack: Slack = "auto",
        dtype: torch.dtype | None = None,
        inputs: Tensor | None = None,
    ) -> "GaugeAlignedConv2d":
        """As `GaugeAlignedLinear.from_factors`; `inputs` are unfolded rows (t, C_in·h·w)."""
        aligned = min(u.shape[1] - resolve_slack(u, v, slack, dtype or u.dtype, inputs), u.shape[0] - 1)
        shape, dtype = (u.shape[0], v.shape[0]), dtype or u.dtype
        layer = cls(shape, u.shape[1], aligned, geometry, bias=bias is not None, device=u.device, dtype=dtype)
        layer._fill(u, v, bias)
        return layer

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        latent = self.latent(x)
        if self.aligned == 0:
            return self.expand(latent)
        head = latent.narrow(-3, 0, self.aligned)
        if self.bias is not None:
            head = head + self.bias.to(latent.dtype)[:, None, None]
        return torch.cat([head, self.expand(latent)], -3)


def _are_plain(x: Tensor, latent: Tensor, *weights: Tensor) -> bool:
    """Whether a product may be written into a buffer: no meta tensor, no subclass, one dtype, which autocast keeps."""
    return (
        not x.is_meta
        and latent.dtype == x.dtype
        and all(type(one) is Parameter and one.dtype == x.dtype for one in weights)
    )


@torch.no_grad()
def resolve_slack(u: Tensor, v: Tensor, slack: Slack, dtype: torch.dtype, inputs: Tensor | None = None) -> int:
    """The number of slack columns that `slack` stands for at factors u (m, r) and v (n, r).

    "auto" is the least within the dtype's error bound; in half precision the least of whole blocks.

    Raises:
        FlexrankError: a number outside 0 … r.
    """
    if slack == "auto":
        if inputs is None or not bool(inputs.any()):  # rows of zeros would call every form exact
            generator = torch.Generator().manual_seed(0)
            inputs = torch.randn(64, v.shape[0], generator=generator)
        least = choose_slack(u.double(), v.double(), inputs.double().to(u.device), dtype)
        return whole_slack((len(u), len(v)), u.shape[1], least, str(dtype).removeprefix("torch."))
    if not 0 <= slack <= u.shape[1]:
        raise FlexrankError(f"slack {slack} is out of range; rank {u.shape[1]} takes 0 to {u.shape[1]}, or 'auto'")
    return slack


def convolution(geometry: ConvGeometry, filters: int, *, bias: bool, device: Any, dtype: Any) -> nn.Conv2d:
    """An empty convolution of this geometry."""
    channels, kernel, stride, padding, dilation = geometry
    return nn.Conv2d(channels, filters, kernel, stride, padding, dilation, bias=bias, device=device, dtype=dtype)


def _positions(x: Tensor, geometry: ConvGeometry) -> int:
    """Output positions of a convolution over x (…, C, H, W): its number of tokens."""
    count = math.prod(x.shape[:-3])
    sides = zip(x.shape[-2:], *geometry[1:], strict=True)
    for size, kernel, stride, padding, dilation in sides:
        count *= (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return count
