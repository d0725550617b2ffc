"""Second moments of layers, in memory and in a file."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from torch import Tensor

from flexrank.errors import FlexrankError, first_line
from flexrank.files import atomic_file, clear_write_errors


@dataclasses.dataclass
class LayerMoment:
    """Moments of one layer, float64, summed over `tokens` rows."""

    side: Literal["input", "output"]  #: of Σ = Σ_t x_t x_tᵀ (n × n), or of C = W Σ Wᵀ (m × m)
    moment: Tensor  #: the same tensor for all layers that read the same input
    mean_square: float = 0.0  #: tr(Σ)/n
    tokens: int = 0
    gradient_moment: Tensor | None = None  #: G (m × m), of the loss's gradient at the output; None without a loss


Moments = dict[str, LayerMoment]


def save_moments(moments: Moments, path: str | Path) -> None:
    """Writes moments to one safetensors file; a shared moment is written once."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, dict[str, Any]] = {}
    owners: dict[int, str] = {}
    for name, layer in moments.items():
        owner = owners.setdefault(id(layer.moment), name)
        tensors[f"{owner}.moment"] = layer.moment.contiguous()
        if layer.gradient_moment is not None:
            tensors[f"{name}.gradient_moment"] = layer.gradient_moment.contiguous()
        header[name] = {"side": layer.side, "tokens": layer.tokens, "mean_square": layer.mean_square, "owner": owner}
    with atomic_file(path) as aside, clear_write_errors(path):
        safetensors.torch.save_file(tensors, aside, metadata={"layers": json.dumps(header)})


def load_moments(path: str | Path) -> Moments:
    """Reads a file of `save_moments`; layers that shared a moment share it again. Raises FlexrankError for others."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            header = json.loads((file.metadata() or {}).get("layers", "{}"))
    except (OSError, safetensors.SafetensorError) as error:
        raise FlexrankError(f"{path}: cannot be read as moments: {first_line(error)}") from error
    if not header:
        raise FlexrankError(f"{path}: not a file that save_moments wrote")
    return {
        name: LayerMoment(
            entry["side"], tensors[f"{entry['owner']}.moment"], entry["mean_square"], entry["tokens"],
            tensors.get(f"{name}.gradient_moment"),
        )
        for name, entry in header.items()
    }  # fmt: skip
