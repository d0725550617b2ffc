"""Second moments of layers: as values, merged, and as a file."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from torch import Tensor

from flexrank.errors import FlexrankError
from flexrank.files import write_aside


@dataclasses.dataclass
class LayerMoment:
    """Moments of one layer, summed over tokens.

    Attributes:
        side: "input" for Σ = Σ_t x_t x_tᵀ (n × n), "output" for C = W Σ Wᵀ (m × m).
        moment: float64; the same tensor for all layers that read the same input.
        mean_square: tr(Σ)/n.
        tokens: the number of rows summed.
        gradient_moment: G (m × m) float64, the second moment of the loss's gradient at the output; None without a loss.
    """

    side: Literal["input", "output"]
    moment: Tensor
    mean_square: float = 0.0
    tokens: int = 0
    gradient_moment: Tensor | None = None


Moments = dict[str, LayerMoment]


def merge_moments(first: Moments, second: Moments) -> Moments:
    """The moments of two sets of samples together; both are left as they are.

    Raises:
        FlexrankError: they differ in layers, side, or gradients.
    """
    if _kinds(first) != _kinds(second):
        raise FlexrankError("moments of other layers, sides or gradients cannot be merged; collect both alike")
    sums: dict[int, Tensor] = {}  # layers that share their input's moment share the sum
    merged: Moments = {}
    for name, layer in first.items():
        other = second[name]
        moment = sums.setdefault(id(layer.moment), layer.moment + other.moment)
        gradient = None
        if layer.gradient_moment is not None and other.gradient_moment is not None:
            gradient = layer.gradient_moment + other.gradient_moment
        mean_square, tokens = layer.mean_square + other.mean_square, layer.tokens + other.tokens
        merged[name] = LayerMoment(layer.side, moment, mean_square, tokens, gradient)
    return merged


def _kinds(moments: Moments) -> list[tuple[str, str, bool]]:
    return [(name, layer.side, layer.gradient_moment is None) for name, layer in moments.items()]


def save_moments(moments: Moments, path: str | Path) -> None:
    """Writes moments to one safetensors file; shared moments once."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, dict[str, Any]] = {}
    owners: dict[int, str] = {}
    for name, layer in moments.items():
        owner = owners.setdefault(id(layer.moment), name)
        tensors[f"{owner}.moment"] = layer.moment.contiguous()
        if layer.gradient_moment is not None:
            tensors[f"{name}.gradient_moment"] = layer.gradient_moment.contiguous()
        header[name] = {
            "side": layer.side, "tokens": layer.tokens, "mean_square": layer.mean_square, "owner": owner
        }  # fmt: skip
    with write_aside(path) as aside:
        safetensors.torch.save_file(tensors, aside, metadata={"layers": json.dumps(header)})


def load_moments(path: str | Path) -> Moments:
    """Reads `save_moments`' file; layers that shared a moment share it again."""
    moments: Moments = {}
    with safetensors.safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["layers"])
    for name, layer in header.items():
        moments[name] = LayerMoment(
            layer["side"], tensors[f"{layer['owner']}.moment"], layer["mean_square"], layer["tokens"],
            tensors.get(f"{name}.gradient_moment"),
        )  # fmt: skip
    return moments
