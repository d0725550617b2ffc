"""Fits one size of a decomposed model to the base model's outputs, layer after layer, without training."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.calibrate import STATE_BYTES, find_groups
from flexrank.calibrate.block_stream import States
from flexrank.calibrate.collector import calibration_mode, call_parts, first_of
from flexrank.calibrate.flow import Flow
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, require_several, row_masks, to_device
from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.experts import separate_experts
from flexrank.nn.linalg import ROWS, refit
from flexrank.nn.matrix import input_rows, masked_rows, match_mask_layout
from flexrank.nn.select import require_unwrapped
from flexrank.nn.sharding import require_whole
from flexrank.nn.switch import nested_layers, set_profile
from flexrank.progress import track

#: The share of the base model's inputs in what a layer's outputs are fitted to; 0 and 1 are worse (docs/log.md).
MIX = 0.5


class Sums(NamedTuple):
    """Sums over the T rows x that a layer reads, and t = (1 − `MIX`) x + `MIX` x₀ with x₀ read in the base model."""

    inputs: Float[Tensor, "n n"]  #: Σ (x − x̄) (x − x̄)ᵀ
    targets: Float[Tensor, "n n"]  #: Σ (t − t̄) (x − x̄)ᵀ
    means: Float[Tensor, "2 n"]  #: x̄ and t̄
    rows: int  #: T


@torch.no_grad()
def refit_(model: nn.Module, profile: Mapping[str, int], base: nn.Module, batches: Iterable[Batch]) -> None:
    """Fits a decomposed model in place at one profile, which is then its only one, without training.

    Decomposition fits each layer to the base model's inputs. At small sizes a layer's inputs differ, because the layers
    before it are small too. So here each layer, in the order in which they run, is fitted to what it then reads, by
    least squares: its factors and, if it has one, its bias (`linalg.refit`). It is meant for sizes that are not
    trained: consolidation does more, and for all sizes at once. For each set of layers that share an input it takes two
    forwards of their block (of both models whole, if blocks cannot run alone), and for T tokens 2·T·n² multiply-adds.
    Memory holds both models, the hidden states of all batches (over 4 GiB in a temporary file), and four n × n matrices
    in float64. After an error the model may be partly fitted.

    Source: PIFA's reconstruction (Zhao et al., ICML 2025). Its fit of the right factor weighs all outputs
    alike; here components keep the weights that decomposition gave them, and biases are fitted too.

    Args:
        model: from `decompose_`, with all its components.
        profile: a rank for each elastic layer.
        base: the model before decomposition.
        batches: those of the calibration, or more.

    Raises:
        FlexrankError: the profile does not fit, the model was consolidated or is another than the base model, a layer
            does not run or reads a value that is not finite, or it reads other rows than in the base model, as experts
            do.
    """
    require_unwrapped(model)
    require_several(batches)
    require_whole(model, "refit_")
    batches, layers, device = list(batches), nested_layers(model), model_device(model)
    first = to_device(first_of(iter(batches)), device)
    _require_decomposed(layers)
    set_profile(model, profile)
    with separate_experts(base), calibration_mode(model, device, False), eval_mode(base), States(STATE_BYTES) as states:
        _require_same_layers(layers, base)
        groups = find_groups(lambda: call_model(model, first), layers)
        flows = [Flow(one, batches, list(layers), states) for one in (base, model)]
        for group in track(groups, "refitting"):
            sums = _sums(group[0], layers[group[0]], flows, batches)
            for name in group:
                _fit_(layers[name], sums)


def _require_decomposed(layers: Mapping[str, NestedLayer]) -> None:
    for name, layer in layers.items():
        if layer.sizes is not None or len(layer.u) < min(layer.matrix_shape):
            raise FlexrankError(f"layer {name!r} was consolidated or lacks components; give the model of decompose_")


def _require_same_layers(layers: Mapping[str, NestedLayer], base: nn.Module) -> None:
    if missing := layers.keys() - dict(base.named_modules()).keys():
        raise FlexrankError(f"layer {min(missing)!r} is not in the base model; give the model that was decomposed")
    if any(isinstance(base.get_submodule(name), NestedLayer) for name in layers):
        raise FlexrankError("the base model has elastic layers; give the model before decomposition")


def _sums(name: str, layer: NestedLayer, flows: Iterable[Flow], batches: Iterable[Batch]) -> Sums:
    """The sums over all real tokens of what the layer reads.

    Products are in float32 or better, of distances from the first rows' mean: a mean far from 0 would take the digits.
    """
    size, device, count = layer.matrix_shape[1], layer.u.device, 0
    inputs, targets, means, shift = (
        torch.zeros(*shape, dtype=torch.float64, device=device)
        for shape in ((size, size), (size, size), (2, size), (size,))
    )
    for batch, *calls in zip(batches, *(flow.inputs(name) for flow in flows), strict=True):
        masks = row_masks(to_device(batch, device))
        for was, now in itertools.zip_longest(*(_rows(layer, one, masks) for one in calls)):
            if was is None or now is None or was.shape != now.shape:
                reason = "as experts do, so this model cannot be fitted"
                raise FlexrankError(f"layer {name!r} reads other rows than in the base model, {reason}")
            if len(now) and not count:
                shift = now.mean(dim=0)
            wanted, now = torch.lerp(now, was.to(now), MIX) - shift.to(now), now - shift.to(now)
            inputs += now.T @ now
            targets += wanted.T @ now
            means += torch.stack([now.double().sum(dim=0), wanted.double().sum(dim=0)])
            count += len(now)
    if not bool(torch.isfinite(targets).all()):
        raise FlexrankError(f"layer {name!r} reads a value that is not finite; check it, or load the model in float32")
    now, wanted = means = means / max(count, 1)
    inputs -= count * torch.outer(now, now)
    targets -= count * torch.outer(wanted, now)
    return Sums(inputs, targets, means + shift.double(), count)


def _rows(layer: nn.Module, calls: Iterable[Tensor], masks: list[Tensor]) -> Iterator[Float[Tensor, "t n"]]:
    """Rows of real tokens, at most `ROWS` at a time, in float32 or better."""
    for inputs in calls:
        for part, _, some in call_parts(layer, inputs, inputs, match_mask_layout(masks, inputs)):
            for rows in masked_rows(input_rows(layer, part), some).split(ROWS):
                yield rows.to(torch.promote_types(rows.dtype, torch.float32))


def _fit_(layer: NestedLayer, sums: Sums) -> None:
    """Fits the layer in place at its rank; without a bias it has to give the mean too."""
    inputs, targets, (now, wanted) = sums.inputs, sums.targets, sums.means
    if layer.bias is None:
        inputs = inputs + sums.rows * torch.outer(now, now)
        targets = targets + sums.rows * torch.outer(wanted, now)
    u, v = (factor.to(layer.u.dtype) for factor in refit(layer.u, layer.v, layer.rank, inputs, targets)[:2])
    if layer.bias is not None:
        mean = layer.u.T.double() @ (layer.v.double() @ wanted) - u.T.double() @ (v.double() @ now)
        bias = (layer.bias.double() + mean).to(layer.bias.dtype)
        layer.bias = nn.Parameter(bias, layer.bias.requires_grad)
    # New parameters, because other models may share the old ones.
    layer.u, layer.v = nn.Parameter(u, layer.u.requires_grad), nn.Parameter(v, layer.v.requires_grad)
    layer.chain, layer.card_sizes = None, ""  # which are of the artefact's sizes
