"""Layers of rivals, for comparison; the library does not use them."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class PivotedLinear(nn.Module):
    """y[pivots] = z, y[rest] = Û z, with z = Ṽᵀx: aligned to pivot rows (Zhao et al., PIFA, ICML 2025).

    Stores r·(m+n−r) parameters and the rows' indices; one gather puts the output in order.
    """

    places: Tensor  #: (m,) the index of each output in [z ; Û z]

    def __init__(self, inputs: int, rank: int, order: Int[Tensor, " m"], *, dtype: torch.dtype):
        super().__init__()
        placement: dict[str, Any] = {"device": order.device, "dtype": dtype}
        self.latent = nn.Linear(inputs, rank, bias=False, **placement)
        self.expand = nn.Linear(rank, len(order) - rank, bias=False, **placement)
        self.register_buffer("places", order.argsort())

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:  # noqa: D102
        latent = self.latent(x)
        return torch.cat((latent, self.expand(latent)), -1).index_select(-1, self.places)


def pivoted_order(u: Float[Tensor, "m r"]) -> Int[Tensor, " m"]:
    """Returns an order of U's rows: the r chosen by QR of Uᵀ with column pivoting, then the others, each ascending."""
    import scipy.linalg

    _, chosen = scipy.linalg.qr(u.T.double().cpu().numpy(), mode="r", pivoting=True)
    rank = u.shape[1]
    return torch.tensor([*sorted(chosen[:rank]), *sorted(chosen[rank:])], dtype=torch.int64, device=u.device)
