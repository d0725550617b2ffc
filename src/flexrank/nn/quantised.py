"""Weights that torchao has quantised, as the plain tensors that safetensors holds, and made from them again."""

import json
from collections.abc import Mapping

from torch import Tensor, nn

from flexrank.errors import FlexrankError

#: The list of quantised tensors, in the header of a file that has some; the header also has torchao's note on each.
NOTED = "tensor_names"


def is_quantised(state: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of this state is torchao's."""
    return any(_is_of_torchao(tensor) for tensor in state.values())


def require_unquantised(model: nn.Module) -> None:
    """Raises FlexrankError if an elastic model has torchao's weights, which cannot be copied or cast like others."""
    if is_quantised(model.state_dict()):
        raise FlexrankError(f"{type(model).__name__} has quantised weights; quantise its deployed sizes")


def flatten_quantised(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state with each of torchao's tensors as the plain ones that it consists of, and torchao's notes on those.

    Without quantised tensors the notes are empty. Raises FlexrankError for a tensor that torchao cannot take apart.
    """
    quantised = {name: tensor for name, tensor in state.items() if _is_of_torchao(tensor)}
    if not quantised:
        return dict(state), {}
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.prototype.safetensors.safetensors_utils import ALLOWED_TENSORS_SUBCLASSES

    for name, tensor in quantised.items():
        if type(tensor).__name__ not in ALLOWED_TENSORS_SUBCLASSES:
            kind, right = type(tensor).__name__, "save the size before quantising it, or choose another configuration"
            raise FlexrankError(f"{name!r} is quantised as {kind}, which torchao does not store in files; {right}")
        if "." not in name:
            raise FlexrankError(f"{name!r} is quantised, and the model itself is its layer; wrap it in nn.Sequential")
    parts, notes = flatten_tensor_state_dict(quantised)
    return {name: tensor for name, tensor in state.items() if name not in quantised} | parts, notes


def part_names(notes: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of the plain tensors that each quantised one of these notes consists of."""
    found = {}
    for name in json.loads(notes.get(NOTED, "[]")):
        owner, _, leaf = name.rpartition(".")
        found[name] = [f"{owner}._{leaf}_{part}" for part in json.loads(notes[name])["_tensor_data_names"]]
    return found


def unflatten_quantised(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> dict[str, Tensor]:
    """The state that `flatten_quantised` took apart."""
    state = dict(tensors)
    for name, parts in part_names(notes).items():
        state[name] = _unflatten_one({part: state.pop(part) for part in parts}, name, notes[name])
    return state


def _unflatten_one(parts: dict[str, Tensor], name: str, note: str) -> Tensor:
    """Makes one quantised tensor. Given all of them, torchao's function needs time with the cube of their number."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    return unflatten_tensor_state_dict(parts, notes_on(name, note))[0][name]


def notes_on(name: str, note: str) -> dict[str, str]:
    """The notes of torchao as if this tensor were the only quantised one."""
    return {NOTED: json.dumps([name]), name: note}


def _is_of_torchao(tensor: Tensor) -> bool:
    return type(tensor).__module__.startswith("torchao.")
