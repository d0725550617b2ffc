"""KFAC-SVD: singular value decomposition by token-wise statistics of inputs and gradients (Thoma et al., ICML 2026).

The Fisher information of a layer's weight is approximated by a Kronecker product (Martens and Grosse, 2015) of the
inputs' A = Σ_t x_t x_tᵀ (n × n) and, from the loss's gradients at the outputs, G = Σ_t g_t g_tᵀ (m × m). This is the
mathematics of flexrank's `fisher`. KFAC-SVD differs in how it regularises the sums: gradients are of the middle tokens
of each sample, with norms bounded around their mean, and both sums are shrunk far towards a multiple of the identity.
"""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flexrank.calibrate import Hooks
from flexrank.calibrate.collector import calibration_mode, seeded_loss
from flexrank.data.batches import Batch, batch_rows, call_model, model_device, row_masks, to_device
from flexrank.nn.linalg import Factors, gram_of
from flexrank.nn.matrix import input_rows, masked_rows, match_mask_layout, matrix_shape, output_rows
from research.baselines.method import Layers, Loss, split

Moments = tuple[Float[Tensor, "n n"], Float[Tensor, "m m"]]
#: The share of a sample's tokens dropped at either end, not of an image's, and the bounds of a gradient's norm over the
#: mean norm.
EDGE, SHORTEST, LONGEST = 0.125, 0.1, 10.0
#: Gradients with a norm below this share of the sample's largest are rounding, such as all those of a first token's
#: queries. The authors' bound is an absolute 1e-10, above which rounding is scaled up too.
ROUNDING = 1e-5
#: The shares of A and G replaced by a multiple of the identity, for language models; for images the second is .7.
INPUT_SHRINKAGE, GRADIENT_SHRINKAGE = 0.1, 0.3


def moments(model: nn.Module, batches: Sequence[Batch], layers: Layers, loss: Loss) -> dict[str, Moments]:
    """Returns A and G of each layer over real tokens, summed in float64."""
    sums = {name: tuple(_zeros(size) for size in matrix_shape(layer)[::-1]) for name, layer in layers.items()}
    seen, device = list[tuple[str, GradientEdge]](), model_device(model)
    masks, share = list[Tensor](), 0.0 if is_vision(model) else EDGE

    def record(name: str, inputs: Tensor, outputs: Tensor) -> None:
        rows = masked_rows(input_rows(layers[name], inputs), match_mask_layout(masks, inputs)).detach()
        sums[name][0].add_(gram_of(rows).cpu())
        seen.append((name, get_gradient_edge(outputs)))

    with calibration_mode(model, device, with_gradients=True), Hooks() as hooks:
        hooks.on_forward(layers, record)
        for number, batch in enumerate(batches):
            batch = to_device(batch, device)
            masks[:] = row_masks(batch)
            total = seeded_loss(loss, call_model(model, batch), batch, number)
            gradients = torch.autograd.grad(total, [edge for _, edge in seen], allow_unused=True)
            for (name, _), gradient in zip(seen, gradients, strict=True):
                if gradient is not None:  # the loss reaches the layer
                    rows = output_rows(layers[name], gradient)
                    sums[name][1].add_(_middle_moment(_samples(rows, masks, batch_rows(batch)), share).cpu())
            seen.clear()
    return {name: (pair[0], pair[1]) for name, pair in sums.items()}


def is_vision(model: nn.Module) -> bool:
    """Returns whether the model reads no tokens but images, of which the authors drop no rows."""
    return getattr(model, "main_input_name", None) != "input_ids"


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, size, dtype=torch.float64)


def _samples(rows: Float[Tensor, "t m"], masks: Iterable[Tensor], count: int) -> list[Tensor]:
    """Returns the rows of each sample, without those whose tokens are not real."""
    parts = rows.unflatten(0, (count, -1))
    for mask in masks:
        if mask.numel() == len(rows):
            return [part[real.to(part.device)] for part, real in zip(parts, mask.reshape(count, -1), strict=True)]
    return list(parts)


def _middle_moment(samples: Iterable[Float[Tensor, "t m"]], share: float) -> Float[Tensor, "m m"]:
    """Returns G, summed over samples, without this share of each sample's rows at either end."""
    middles = []
    for rows in samples:
        edge = int(share * len(rows))
        middles.append(bounded(rows[edge : len(rows) - edge]))
    return gram_of(torch.cat(middles))


def bounded(gradients: Float[Tensor, "t m"]) -> Float[Tensor, "t m"]:
    """Rescales the gradients of one sample to norms within `SHORTEST` and `LONGEST` times their mean.

    Rounding is left as it is.
    """
    if not bool(gradients.any()):
        return gradients
    lengths = gradients.norm(dim=1)
    some = lengths > ROUNDING * lengths.max()
    mean = lengths[some].mean()
    scale = torch.where(some, lengths.clamp(SHORTEST * mean, LONGEST * mean) / lengths, 1.0)
    return gradients * scale[:, None]


def shrunk(moment: Float[Tensor, "n n"], part: float) -> Float[Tensor, "n n"]:
    """Returns (1 − part) M + part · tr(M)/n · I in float64; the identity if M is zero."""
    moment = moment.double()
    mean = moment.diagonal().mean()
    identity = torch.eye(len(moment), dtype=torch.float64, device=moment.device)
    return (1 - part) * moment + part * mean * identity if mean > 0 else identity


def factors(
    weight: Float[Tensor, "m n"],
    pair: Moments,
    gradient_shrinkage: float = GRADIENT_SHRINKAGE,
    as_coded: bool = False,
) -> Factors:
    """Returns factors whose prefix minimises tr(G (W − W_r) A (W − W_r)ᵀ) for every r, with A and G shrunk.

    With A = L_A L_Aᵀ, G = L_G L_Gᵀ and L_Gᵀ W L_A = P Λ Q, W_r = L_G⁻ᵀ P_r Λ_r · Q_r L_A⁻¹. The authors' code has
    L_G W L_A instead, which replaces G by L_Gᵀ L_G: the same eigenvalues in other directions (docs/baselines.md). The
    paper's own formula was not available. Neither is always better: with LEMS's ranks and the full calibration, on the
    tuning half of stories260k, the minimum is better from .9 (1.430 nats against 1.452) to .5 (4.059 against 4.120),
    and `as_coded` from .4 (5.038 against 5.062) to .2. So both are tried for each model, and the better is compared.
    """
    root = torch.linalg.cholesky(shrunk(pair[0], INPUT_SHRINKAGE))
    other = torch.linalg.cholesky(shrunk(pair[1], gradient_shrinkage))
    left, values, right = torch.linalg.svd((other if as_coded else other.T) @ weight @ root, full_matrices=False)
    left = torch.linalg.solve_triangular(other if as_coded else other.T, left, upper=not as_coded)
    return split(left, values, torch.linalg.solve_triangular(root, right, upper=False, left=False))
