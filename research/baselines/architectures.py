"""The names of the layers in a transformer's block, for methods that treat heads and channels by themselves."""

import dataclasses
from typing import Any

from torch import nn


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of a block's linear layers in transformers; one name thrice where a layer stacks q, k and v."""

    query: str
    key: str
    value: str
    output: str
    ups: tuple[str, ...]
    down: str
    is_rotary: bool  #: dimensions i and i + d/2 of a head rotate together

    @property
    def all(self) -> tuple[str, ...]:
        """All layers, each once."""
        return (*self.projections, self.output, *self.ups, self.down)

    @property
    def projections(self) -> tuple[str, ...]:
        """The layers that make queries, keys and values."""
        return tuple(dict.fromkeys((self.query, self.key, self.value)))

    @property
    def is_fused(self) -> bool:
        """Whether one layer stacks q, k and v."""
        return self.query == self.key


LLAMA = Names(
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", is_rotary=True,
)  # fmt: skip
BERT = Names(
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    ("intermediate.dense",), "output.dense", is_rotary=False,
)  # fmt: skip
VIT = Names(
    "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", ("mlp.fc1",), "mlp.fc2",
    is_rotary=False,
)  # fmt: skip
DINOV3 = dataclasses.replace(VIT, ups=("mlp.up_proj",), down="mlp.down_proj", is_rotary=True)
DINOV3_GATED = dataclasses.replace(DINOV3, ups=("mlp.gate_proj", "mlp.up_proj"))
GPT2 = Names("attn.c_attn", "attn.c_attn", "attn.c_attn", "attn.c_proj", ("mlp.c_fc",), "mlp.c_proj", is_rotary=False)
#: Those with the most layers first: a block that has all of a later one's layers may have more.
ARCHITECTURES = (LLAMA, BERT, VIT, DINOV3_GATED, DINOV3, GPT2)


def model_type(model: Any) -> str:
    """Returns transformers' name for the model's architecture, or that of its class."""
    return getattr(getattr(model, "config", None), "model_type", type(model).__name__)


def find_names(block: nn.Module) -> Names | None:
    """Returns the names of the first architecture all of whose layers the block has."""
    present = {name for name, _ in block.named_modules()}
    return next((names for names in ARCHITECTURES if set(names.all) <= present), None)
