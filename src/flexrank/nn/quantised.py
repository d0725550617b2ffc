"""Weights that torchao has quantised, as the plain tensors that safetensors holds, and made from them again."""

from collections.abc import Mapping

from torch import Tensor

from flexrank.errors import FlexrankError

#: torchao's list of a file's tensors, in the header of a file with quantised ones.
NOTED = "tensor_names"


def is_quantised(state: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of this state is torchao's."""
    return any(type(tensor).__module__.startswith("torchao.") for tensor in state.values())


def taken_apart(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Plain tensors, into which torchao takes its own apart, and its notes, from which `put_together` makes them again.

    Without quantised tensors the notes are empty, and the state is returned as it is. Raises FlexrankError for a kind
    of tensor that torchao cannot take apart.
    """
    if not is_quantised(state):
        return dict(state), {}
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.prototype.safetensors.safetensors_utils import ALLOWED_TENSORS_SUBCLASSES

    known = {*ALLOWED_TENSORS_SUBCLASSES, Tensor.__name__}
    for name, tensor in state.items():
        if type(tensor).__name__ not in known:
            kind, right = type(tensor).__name__, "save the size before quantising it, or choose another configuration"
            raise FlexrankError(f"{name!r} is quantised as {kind}, which torchao does not store in files; {right}")
    return flatten_tensor_state_dict(dict(state))


def put_together(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> dict[str, Tensor]:
    """The state that `taken_apart` took apart; without notes, the tensors as they are."""
    if NOTED not in notes:
        return dict(tensors)
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    state, _ = unflatten_tensor_state_dict(dict(tensors), dict(notes))
    return state
