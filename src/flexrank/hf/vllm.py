"""The vLLM plug-in: `vllm serve DIR` runs an export, with each layer at its own rank inside vLLM's fused layers.

vLLM calls `register` through the entry point `vllm.general_plugins`; nothing else imports this module, because it needs
vLLM. Source of the interface: https://docs.vllm.ai, "Quantization plugins", and vLLM 0.32.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from flexrank.errors import FlexrankError
from flexrank.hf.models import QUANT_METHOD
from flexrank.nn.fused import FusedShards, Shard
from flexrank.nn.specs import FORMAT, require_format

#: The index of each part of a fused layer, by vLLM's name for it; vLLM names gate and up by their indices.
SHARD_INDEX = {None: 0, "q": 0, "k": 1, "v": 2}

#: By model type, the layers whose weights vLLM rearranges by head while loading, whatever their shape.
REARRANGED = {
    "bloom": ("query_key_value",),
    "llama4": ("q_proj", "k_proj"),
    "llama4_text": ("q_proj", "k_proj"),
}


def register() -> None:
    """Makes vLLM recognise exports by the `quant_method` in their `config.json`; calling it again changes nothing."""
    register_quantization_config(QUANT_METHOD)(ServedConfig)


class ServedConfig(QuantizationConfig):
    """The `quantization_config` of a deployed model, which tells vLLM what to build for each of its linear layers."""

    def __init__(self, layers: Mapping[str, Mapping[str, Any]]):
        super().__init__()
        self.layers = dict(layers)
        self.names_loaded = set[str]()  # of layers; none for a server's dummy weights

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ServedConfig":  # noqa: D102
        require_format(config.get("format", FORMAT))
        return cls(config["layers"])

    def get_name(self) -> Any:  # noqa: D102
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:  # noqa: D102
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:  # noqa: D102
        return 0  # plain matrix products

    @staticmethod
    def get_config_filenames() -> list[str]:  # noqa: D102
        return []

    def maybe_update_config(self, model_name: str, hf_config: Any = None, **ignored: Any) -> None:
        """Raises FlexrankError for a model whose factors vLLM would rearrange as if they were matrices."""
        kind = getattr(hf_config, "model_type", "")
        for name in filter(self._is_aligned, self.layers):
            if name.rpartition(".")[2] in REARRANGED.get(kind, ()):
                right = "serve an export `--to dense`, or exclude such layers"
                raise FlexrankError(f"{model_name}: vLLM rearranges {name} of {kind} as if it were a matrix; {right}")

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames the layers to the names that they have in vLLM's model."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """How vLLM's layer multiplies; raises FlexrankError if vLLM builds a factorised layer inside another kind."""
        if isinstance(layer, LinearBase):
            parent, _, own = prefix.rpartition(".")
            names = [f"{parent}.{name}" if parent else name for name in self.packed_modules_mapping.get(own, [own])]
            if any(self._is_aligned(name) for name in names):
                return FactorisedLinearMethod({name: self.layers.get(name) for name in names}, self.names_loaded)
            return UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead):
            if not self._is_aligned(prefix):
                return None
            return FactorisedHeadMethod({prefix: self.layers[prefix]}, self.names_loaded)
        inside = [name for name in self.layers if f"{name}.".startswith(f"{prefix}.") and self._is_aligned(name)]
        if prefix and inside:
            kind = type(layer).__name__
            raise FlexrankError(f"vLLM builds {inside[0]} inside a {kind}; serve an export `--to dense`, or exclude it")
        return None

    def _is_aligned(self, name: str) -> bool:
        return name in self.layers and self.layers[name]["form"] == "aligned"


class FactorisedLinearMethod(LinearMethodBase):
    """How a linear layer of vLLM holds and applies one or several layers of the checkpoint, not all of them dense."""

    def __init__(self, specs: Mapping[str, Mapping[str, Any] | None], names_loaded: set[str]):
        self.specs = dict(specs)
        self._names_loaded = names_loaded

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **ignored: Any,
    ) -> None:
        """Adds the parameters of this process's part, and makes biases load as exports store them."""
        outputs = output_partition_sizes
        if len(self.specs) == 1 and len(outputs) > 1:  # fused in the checkpoint already
            if layer.tp_size > 1:
                raise FlexrankError(f"{next(iter(self.specs))}: fused in its files, so no tensor parallelism")
            outputs = [sum(outputs)]
        columns = _part(input_size, input_size_per_partition, layer)
        named = enumerate(zip(self.specs.items(), outputs, strict=True))
        shards = [_shard(layer, index, name, spec, size, columns) for index, ((name, spec), size) in named]
        self._add_to_(layer, shards, params_dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: D102
        y = self.shards.multiply(layer, x)
        return y if bias is None else y + bias

    def process_weights_after_loading(self, layer: Any) -> None:
        """Raises FlexrankError if a weight is missing, which vLLM does not check for quantized models."""
        self.shards.require_complete(layer)

    def _add_to_(self, layer: Any, shards: list[Shard], dtype: torch.dtype) -> None:
        self.shards = FusedShards(shards, self._names_loaded)
        parameter: Any
        for name, parameter in self.shards.add_to_(layer, dtype).items():
            parameter.weight_loader = functools.partial(self._load, layer, name)
        # vLLM creates the layer's bias after this call, with the loader that it finds on the layer.
        layer.weight_loader = functools.partial(self._load, layer, "bias")

    def _load(self, layer: Any, name: str, parameter: Tensor, values: Tensor, shard: str | int | None = None) -> None:
        index = shard if isinstance(shard, int) else SHARD_INDEX[shard]
        self.shards.load_(layer, name, values, index)


class FactorisedHeadMethod(FactorisedLinearMethod):
    """The same for an output head with weights of its own (not tied), whose vocabulary vLLM pads."""

    def create_weights(  # noqa: D102
        self, layer: Any, input_size_per_partition: int, *sizes: Any, params_dtype: Any = None, **ignored: Any
    ) -> None:
        ((name, spec),) = self.specs.items()
        assert spec is not None
        held, columns = layer.shard_indices, range(input_size_per_partition)
        rows = range(held.org_vocab_start_index, held.org_vocab_end_index)
        shard = Shard(name, tuple(spec["shape"]), spec["rank"], spec["aligned"], rows, columns)
        self._add_to_(layer, [shard], params_dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: D102
        y = self.shards.multiply(layer, x)
        y = pad(y, (0, layer.num_embeddings_per_partition - y.shape[-1]))
        return y if bias is None else y + bias


def _shard(layer: Any, index: int, name: str, spec: Mapping[str, Any] | None, size: int, columns: range) -> Shard:
    """The part of one layer that this process holds, with `size` outputs; a layer that was not selected has no spec."""
    if spec is None:  # with few key and value heads, several processes hold the same one
        copies = getattr(layer, "num_kv_head_replicas", 1) if index else 1
        spec = {"form": "dense", "shape": (size * layer.tp_size // copies, layer.input_size)}
    m, n = spec["shape"]
    rank, aligned = (spec["rank"], spec["aligned"]) if spec["form"] == "aligned" else (0, 0)
    return Shard(name, (m, n), rank, aligned, _part(m, size, layer), columns)


def _part(whole: int, size: int, layer: Any) -> range:
    """The rows or columns that this process holds; with fewer parts than processes, neighbours hold the same part."""
    start = layer.tp_rank // (layer.tp_size // (whole // size)) * size
    return range(start, start + size)
