"""Gauge-aligned layers: the deployed form of one rank, whose leading outputs are latents themselves."""

from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.nn import Linear, Parameter
from torch.nn.functional import linear
from torch.nn.modules import module as hooks

from flexrank.errors import FlexrankError
from flexrank.files import dtype_name
from flexrank.nn.alignment import choose_slack, gauge_align
from flexrank.nn.matrix import ConvAttributes, ConvGeometry, bias_of, weight_matrix
from flexrank.profiles.costs import whole_slack

Slack = int | Literal["auto"]
Layer = TypeVar("Layer", bound="GaugeAlignedLayer")
#: Up to this many output values, concatenating is faster than writing in place, whose views cost more than a copy.
FEW_OUTPUTS = 2**17


class GaugeAlignedLayer(nn.Module):
    """y = [z_{1:g}; Û z] + b with z = Ṽᵀx, of rank r: the first g = r − slack outputs are latents themselves.

    It stores r·(m+n−g) parameters; g = r is FlexRank, eq. 7, and g = 0 is plain U Vᵀ. `bias` is that of the first g
    outputs. `latent` holds Ṽᵀ, and `expand` holds Û with the bias of the other outputs: ordinary torch layers, which
    adapters and quantisers select by name. The buffer `weight` is empty, so a loader that does not know this layer
    fails on its shape instead of leaving a freshly initialised matrix.
    """

    latent: nn.Module
    expand: nn.Module
    bias: Parameter | None
    weight: Tensor

    def __init__(
        self,
        shape: tuple[int, int],
        rank: int,
        aligned: int,
        geometry: ConvGeometry | None = None,
        *,
        bias: bool,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        m, n = shape
        if not (1 <= rank <= min(m, n) and 0 <= aligned <= rank and aligned < m):
            raise FlexrankError(f"rank {rank} with {aligned} aligned outputs does not fit a {m} x {n} matrix")
        self.matrix_shape, self.rank, self.aligned = shape, rank, aligned
        self.out_features, self.in_features = shape
        self.geometry = geometry
        placement = {"device": device, "dtype": dtype}
        self.register_parameter("bias", Parameter(torch.zeros(aligned, **placement)) if bias and aligned else None)
        self.register_buffer("weight", torch.empty(0, **placement))
        if geometry is None:
            self.latent = Linear(n, rank, bias=False, **placement)
            self.expand = Linear(rank, m - aligned, bias=bias, **placement)
        else:
            self.latent = geometry.layer(rank, bias=False, **placement)
            self.expand = nn.Conv2d(rank, m - aligned, 1, bias=bias, **placement)

    @classmethod
    def from_factors(
        cls: type[Layer],
        u: Float[Tensor, "m r"],
        v: Float[Tensor, "n r"],
        bias: Float[Tensor, " m"] | None = None,
        geometry: ConvGeometry | None = None,
        *,
        slack: Slack = "auto",
        dtype: torch.dtype | None = None,
        inputs: Float[Tensor, "t n"] | None = None,
    ) -> Layer:
        """Builds the layer for y = U Vᵀ x + b.

        Raises FlexrankError if the slack is out of range or too small for a singular block of U, or factors overflow.

        Args:
            slack: 0 is the paper's form, r is plain U Vᵀ, and "auto" is the least within the dtype's stated error.
                At r = m it is at least one, because aligning all m outputs would leave only the dense matrix.
            dtype: defaults to that of `u`.
            inputs: activations on which the error is measured, unfolded for a convolution; standard normal by default.
        """
        (m, rank), dtype = u.shape, dtype or u.dtype
        aligned = min(rank - resolve_slack(u, v, slack, dtype, inputs), m - 1)
        layer = cls((m, len(v)), rank, aligned, geometry, bias=bias is not None, device=u.device, dtype=dtype)
        layer._fill(u, v, bias)
        return layer

    @property
    def slack(self) -> int:
        """The number of latents that are not outputs, r − g."""
        return self.rank - self.aligned

    @torch.no_grad()
    def dense(self) -> tuple[Float[Tensor, "m n"], Float[Tensor, " m"] | None]:
        """The layer as one matrix W = [Ṽᵀ_{1:g}; Û Ṽᵀ] in float64 (unfolded for a convolution), and its bias."""
        v_tilde, u_hat = (matrix.detach().double() for matrix in map(weight_matrix, (self.latent, self.expand)))
        parts = [bias for bias in (self.bias, bias_of(self.expand)) if bias is not None]
        return torch.cat((v_tilde[: self.aligned], u_hat @ v_tilde)), torch.cat(parts) if parts else None

    # The argument has the name that it has in torch, for code that gives it by name.
    def forward(self, input: Tensor) -> Tensor:  # noqa: D102
        latent = self.latent(input)
        return self._joined(latent, self.bias, self.expand(latent)) if self.aligned else self.expand(latent)

    def _joined(self, latent: Tensor, bias: Tensor | None, rest: Tensor) -> Tensor:
        head = latent.narrow(-1, 0, self.aligned)
        # Under autocast the latents and the bias have different dtypes.
        return torch.cat((head if bias is None else head + bias.to(latent.dtype), rest), -1)

    @torch.no_grad()
    def _fill(self, u: Tensor, v: Tensor, bias: Tensor | None) -> None:
        if not bool(torch.isfinite(u).all() & torch.isfinite(v).all()):
            raise FlexrankError("the factors are not finite; check the weights that they come from")
        u_hat, v_tilde = gauge_align(u, v, self.slack)
        if not bool(torch.isfinite(u_hat).all()):
            raise FlexrankError(f"the leading {self.aligned} rows of U are singular; give more slack than {self.slack}")
        for layer, matrix in ((self.latent, v_tilde.T), (self.expand, u_hat)):
            assert isinstance(layer.weight, Tensor)
            layer.weight.copy_(matrix.reshape(layer.weight.shape))
            if not bool(torch.isfinite(layer.weight).all()):
                mend = f"give more than {self.slack} slack" if self.aligned else "choose another dtype"
                raise FlexrankError(f"the factors overflow {layer.weight.dtype}; {mend}")
        for own, part in ((self.bias, slice(self.aligned)), (self.expand.bias, slice(self.aligned, None))):
            if bias is not None and isinstance(own, Tensor):
                own.copy_(bias[part])

    def extra_repr(self) -> str:  # noqa: D102
        m, n = self.matrix_shape
        return f"in={n}, out={m}, rank={self.rank}, aligned={self.aligned}"


class GaugeAlignedLinear(GaugeAlignedLayer):
    """The deployed linear layer: (…, n) → (…, m)."""

    def forward(self, input: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:  # noqa: D102
        # Without gradients, hooks or adapters this multiplies by the children's weights directly: calling two modules
        # takes longer than their products for one token. Large outputs are written in place, not concatenated.
        weights = self._plain_weights()
        if weights is None:
            return super().forward(input)
        v_tilde, u_hat, head_bias, bias = weights
        latent = linear(input, v_tilde)
        if self.aligned == 0:
            return linear(latent, u_hat, bias)
        is_small = type(input) is not Tensor or input.numel() * self.out_features <= FEW_OUTPUTS * self.in_features
        if is_small or not _are_plain(input, latent, v_tilde, u_hat):
            return self._joined(latent, head_bias, linear(latent, u_hat, bias))
        output = self._write_in_place(latent.view(-1, self.rank), head_bias, u_hat, bias)
        return output.view(*input.shape[:-1], self.out_features)

    def _plain_weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
        """Ṽᵀ, Û and both biases, or None if calling the children would do more than `linear` does.

        It reads dictionaries, not attributes, and as few as possible: `nn.Module.__getattr__` is slow, and each object
        it reads has left the processor's caches since the last call. It does not query autocast, which would cost most.
        """
        if is_grad_enabled() or is_compiling() or is_tracing():  # a trace would keep this batch's number of rows
            return None
        latent, expand, own = self._modules["latent"], self._modules["expand"], self._parameters
        if type(latent) is not Linear or type(expand) is not Linear:
            return None
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return None
        if latent._forward_hooks or latent._forward_pre_hooks or expand._forward_hooks or expand._forward_pre_hooks:
            return None
        if "forward" in latent.__dict__ or "forward" in expand.__dict__:
            return None
        of_latent, of_expand = latent._parameters, expand._parameters
        v_tilde, u_hat = of_latent.get("weight"), of_expand.get("weight")  # pruning and sharding remove them
        if v_tilde is None or u_hat is None or of_latent.get("bias") is not None:
            return None
        if "bias" not in own or "bias" not in of_expand:
            return None
        return v_tilde, u_hat, own["bias"], of_expand["bias"]

    def _write_in_place(
        self, latent: Float[Tensor, "t r"], head_bias: Tensor | None, u_hat: Float[Tensor, "k r"], bias: Tensor | None
    ) -> Float[Tensor, "t m"]:
        """Writes both parts straight into one output; concatenating them costs 2 to 9 % more on a CPU."""
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


class GaugeAlignedConv2d(ConvAttributes, GaugeAlignedLayer):
    """The deployed convolution: `latent` has r filters, and `expand` is 1 × 1."""

    def _joined(self, latent: Tensor, bias: Tensor | None, rest: Tensor) -> Tensor:
        head = latent.narrow(-3, 0, self.aligned)
        return torch.cat((head if bias is None else head + bias.to(latent.dtype)[:, None, None], rest), -3)


@torch.no_grad()
def resolve_slack(u: Tensor, v: Tensor, slack: Slack, dtype: torch.dtype, inputs: Tensor | None = None) -> int:
    """The slack as a number from 0 to r; "auto" is the least slack within the dtype's error bound.

    In half precision "auto" is rounded up to the least slack that leaves whole blocks of outputs to multiply.
    """
    if slack == "auto":
        if inputs is None or not bool(inputs.any()):  # every form is exact on rows of zeros
            inputs = torch.randn(64, v.shape[0], generator=torch.Generator().manual_seed(0), device="cpu")
        least = choose_slack(u.double(), v.double(), inputs.double().to(u.device), dtype)
        return whole_slack((len(u), len(v)), u.shape[1], least, dtype_name(dtype))
    if not 0 <= slack <= u.shape[1]:
        raise FlexrankError(f"slack {slack} is out of range; rank {u.shape[1]} takes 0 to {u.shape[1]}, or 'auto'")
    return slack


def _are_plain(x: Tensor, latent: Tensor, *weights: Tensor) -> bool:
    """Whether products may be written into a buffer.

    That is, there is no meta tensor, no subclass, no transform of `torch.func`, and one dtype, also under autocast.
    """
    if x.is_meta or latent.dtype != x.dtype or torch._C._are_functorch_transforms_active():
        return False
    return all(type(weight) is Parameter and weight.dtype == x.dtype for weight in weights)
