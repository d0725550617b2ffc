"""Separates experts that transformers fuses into one tensor: each matrix becomes a layer like any other."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.nn.select import replace_layers

#: The key by which a transformers config records that the model's experts are separate, for whoever loads it.
SEPARATE_KEY = "separate_experts"


class Experts(nn.Module):
    """y = Σ_e s_e · down_e(act(gate_e) ⊙ up_e) with [gate_e; up_e] = gate_up_e(x), over the experts e of each token.

    gate_up is (2I × H) and down (H × I), with names such as `experts.3.gate_up`. Experts run one after another, each on
    the rows of its tokens, if any, because transformers' grouped kernels need fused tensors.
    """

    def __init__(self, fused: Any):
        super().__init__()
        self.act_fn, self.num_experts = fused.act_fn, fused.num_experts
        for number, matrices in enumerate(zip(fused.gate_up_proj, fused.down_proj, strict=True)):
            self.add_module(str(number), _Expert(*matrices))
        # Without flexrank, transformers initialises missing fused tensors at random with a warning; empty ones fail.
        self.register_buffer("gate_up_proj", torch.empty(1, 0, 0))
        self.train(fused.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Outputs (T, H) for tokens (T, H), the indices (T, k) of their experts, and the weights (T, k) of these."""
        outputs = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            expert: Any = getattr(self, str(number))
            tokens, columns = self._rows_of(number, top_k_index)
            gate, up = expert.gate_up(hidden_states[tokens]).chunk(2, dim=-1)
            shares = top_k_weights[tokens, columns].unsqueeze(-1)
            outputs.index_add_(0, tokens, (expert.down(self.act_fn(gate) * up) * shares).to(outputs.dtype))
        return outputs

    def _rows_of(self, number: int, top_k_index: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of the tokens routed to this expert, ascending as in token masks, and their columns in (T, k)."""
        if top_k_index.is_meta:  # without values there is no routing: an equal share, for counting operations
            share = top_k_index.new_empty(-(-top_k_index.numel() // self.num_experts))
            return share, share
        tokens, columns = torch.where(top_k_index == number)
        return tokens, columns


class _Expert(nn.Module):
    """One expert's layers, with these matrices as weights."""

    def __init__(self, gate_up: Tensor, down: Tensor):
        super().__init__()
        self.gate_up, self.down = _linear(gate_up), _linear(down)


def separate_experts_(model: nn.Module) -> list[str]:
    """Separates fused experts in place, so `select_layers` finds their layers; returns the names of the modules.

    The layers' weights are views of the fused tensors, and outputs are equal. A model without any is left unchanged.
    """
    fused = _fused_experts(model)
    replace_layers(model, {name: Experts(module) for name, module in fused.items()})
    if fused:
        setattr(model.config, SEPARATE_KEY, True)
    return list(fused)


def separate_as_recorded_(model: Any) -> None:
    """Separates experts if the model's config records that they were separate when its weights were written."""
    if getattr(model.config, SEPARATE_KEY, False):
        separate_experts_(model)


@contextlib.contextmanager
def separate_experts(model: nn.Module) -> Iterator[None]:
    """Separates fused experts inside the block, on the same tensors; then fuses them again, with any changes."""
    fused = _fused_experts(model)
    replace_layers(model, {name: Experts(module) for name, module in fused.items()})
    try:
        yield
    finally:
        replace_layers(model, fused)


def _fused_experts(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if _is_fused(module)}


def _is_fused(module: Any) -> bool:
    """Whether the module holds transformers' fused experts in their default form, without biases."""
    matrices = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not all(isinstance(one, nn.Parameter) and one.ndim == 3 for one in matrices):
        return False
    gate = getattr(getattr(module, "_apply_gate", None), "__name__", "")
    wanted = {"is_concatenated": True, "has_gate": True, "is_transposed": False, "has_bias": False}
    wanted |= {"has_post_expert_norm": False}
    return gate == "_default_apply_gate" and all(getattr(module, name, None) is value for name, value in wanted.items())


def _linear(weight: Tensor) -> nn.Linear:
    """A linear layer with this matrix (m, n) as its weight, without a bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), weight.requires_grad)
    return layer
