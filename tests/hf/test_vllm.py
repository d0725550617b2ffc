"""vLLM's plug-in against a stand-in for vLLM that has its documented interface and nothing else.

The stand-in creates weights, loads the files of an export by vLLM's names, and multiplies, in vLLM's order. vLLM
itself does not install beside what this project pins; `python -m research serving` runs it.
"""

import json
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tiny
from flexrank.deployment import deploy
from flexrank.errors import FlexrankError
from flexrank.nn.switch import nested_layers
from flexrank.profiles import RankProfile

ROOT = Path(__file__).parents[2]
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SHARDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": 0, "up_proj": 1}


class LinearBase(nn.Module):
    """Column or row parallel, perhaps fused: it asks for its method, then for weights, then makes its bias."""

    def __init__(
        self, config: Any, prefix: str, sizes: list[int], inputs: int, *, bias: bool, tp: tuple[int, int], rows: bool
    ):
        super().__init__()
        (self.tp_rank, self.tp_size), self.input_size = tp, inputs
        if len(sizes) == 3 and sizes[1] < self.tp_size * 8:  # vLLM's heads of keys and values, 8 wide here
            self.num_kv_head_replicas = self.tp_size * 8 // sizes[1]
        copies = getattr(self, "num_kv_head_replicas", 1)
        held = [size // self.tp_size * (copies if at else 1) for at, size in enumerate(sizes)] if not rows else sizes
        self.quant_method = config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            layer=self, input_size_per_partition=inputs // self.tp_size if rows else inputs,
            output_partition_sizes=held, input_size=inputs, output_size=sum(sizes), params_dtype=torch.float32,
            weight_loader=self.weight_loader,
        )  # fmt: skip
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.full((sum(held),), float("nan")), requires_grad=False)
            self.bias.weight_loader = self.weight_loader

    def weight_loader(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        raise AssertionError("a loader of vLLM's own")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, self.bias)


class ParallelLMHead(nn.Module):
    """An output head whose vocabulary is padded to 64, and split."""

    def __init__(self, config: Any, prefix: str, vocabulary: int, inputs: int, tp: tuple[int, int]):
        super().__init__()
        self.num_embeddings_per_partition = -(-vocabulary // 64) * 64 // tp[1]
        start = tp[0] * self.num_embeddings_per_partition
        stop = min(start + self.num_embeddings_per_partition, vocabulary)
        self.shard_indices = types.SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)
        self.bias = None
        self.quant_method = config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            self, inputs, [self.num_embeddings_per_partition], inputs, vocabulary, params_dtype=torch.float32,
            weight_loader=None,
        )  # fmt: skip


class Unquantized:
    """vLLM's own way."""


class Packed:
    """vLLM's base class of configs."""

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plug-in, imported beside the stand-in, and what it registered."""
    registered: dict[str, Any] = {}

    def register(name: str) -> Any:
        return lambda kind: registered.setdefault(name, kind)

    linear = {"LinearBase": LinearBase, "LinearMethodBase": object, "UnquantizedLinearMethod": Unquantized}
    layers = "vllm.model_executor.layers"
    contents = {
        "vllm": {}, "vllm.model_executor": {}, layers: {},
        f"{layers}.linear": linear,
        f"{layers}.quantization": {"register_quantization_config": register},
        f"{layers}.quantization.base_config": {"QuantizationConfig": Packed, "QuantizeMethodBase": object},
        f"{layers}.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
    }  # fmt: skip
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"][
        "flexrank"
    ]
    module_name, function = entry.split(":")
    monkeypatch.delitem(sys.modules, module_name, raising=False)
    module = __import__(module_name, fromlist=[function])
    getattr(module, function)()
    getattr(module, function)()  # vLLM may call it twice
    module.registered = registered
    yield module
    sys.modules.pop(module_name)


def export(name: str, path: Path) -> tuple[dict[str, tuple[torch.Tensor, Any]], Any]:
    """Each layer's matrix and bias at ranks of which some are full, so dense; its export lies in the path.

    Returned are these and the `quantization_config`.
    """
    model, ranks, exact = tiny.elastic(name), {}, {}
    for at, (layer, nested) in enumerate(nested_layers(model).items()):
        rank = ranks[layer] = nested.max_rank if at % 4 == 2 else max(nested.max_rank // (2 + at % 3), 1)
        if nested.bias is not None:
            nn.init.normal_(nested.bias, generator=torch.Generator().manual_seed(at))
        exact[layer] = nested.u[:rank].double().T @ nested.v[:rank].double(), nested.bias
    deploy(model, RankProfile(ranks)).save_pretrained(path)
    return exact, json.loads((path / "config.json").read_text())["quantization_config"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, tuple[torch.Tensor, Any]], Any, Path]:
    """One for all tests: its matrices, its config, and where it lies."""
    path = tmp_path_factory.mktemp("llama")
    return (*export("llama_untied", path), path)


def served(
    plugin: Any,
    config: Any,
    path: Path,
    prefix: str,
    sizes: list[int],
    inputs: int,
    *,
    names: list[str] | None = None,
    bias: bool = False,
    tp: tuple[int, int] = (0, 1),
    rows: bool = False,
) -> LinearBase:
    """vLLM's layer `prefix` with the export's tensors."""
    layer = LinearBase(config, prefix, sizes, inputs, bias=bias, tp=tp, rows=rows)
    parent, _, own = prefix.rpartition(".")
    for tensor, values in load_file(path / "model.safetensors").items():
        for part in names or [own]:
            if tensor.startswith(f"{parent}.{part}."):
                parameter = layer.get_parameter(tensor.removeprefix(f"{parent}.{part}."))
                parameter.weight_loader(parameter, values, *([SHARDS[part]] if names else []))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def config_of(plugin: Any, raw: dict[str, Any]) -> Any:
    config = plugin.registered["flexrank"].from_config(raw)
    config.packed_modules_mapping.update(PACKED)
    return config


def wanted(exact: dict[str, tuple[torch.Tensor, Any]], names: list[str], x: torch.Tensor) -> torch.Tensor:
    """What the layers' matrices give, in float64, side by side."""
    outputs = ((x.double() @ matrix.T, bias) for matrix, bias in map(exact.__getitem__, names))
    return torch.cat([y if bias is None else y + bias.double() for y, bias in outputs], -1).detach()


X = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0))


def test_fused_layers_of_a_llama_one_of_them_dense(plugin: Any, llama: Any) -> None:
    model, raw, path = llama
    config = config_of(plugin, raw)
    assert raw["layers"]["model.layers.0.self_attn.v_proj"]["form"] == "dense"
    for block in ("model.layers.0", "model.layers.1"):
        for own, sizes in (("self_attn.qkv_proj", [32, 16, 16]), ("mlp.gate_up_proj", [48, 48])):
            names = PACKED[own.rpartition(".")[2]]
            layer = served(plugin, config, path, f"{block}.{own}", sizes, 32, names=names)
            parent = own.rpartition(".")[0]
            exact = wanted(model, [f"{block}.{parent}.{name}" for name in names], X)
            torch.testing.assert_close(layer(X).double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_four_processes_of_one_layer(plugin: Any, llama: Any, rank: int, selected: bool) -> None:
    """Two heads of keys and values on four processes: each is held twice; a run may have left v out."""
    model, raw, path = llama
    if not selected:
        kept = {name: one for name, one in raw["layers"].items() if not name.endswith("0.self_attn.v_proj")}
        raw = {**raw, "layers": kept}
    config, block = config_of(plugin, raw), "model.layers.0.self_attn"
    names = PACKED["qkv_proj"]
    layer = served(plugin, config, path, f"{block}.qkv_proj", [32, 16, 16], 32, names=names, tp=(rank, 4))
    q, k, v = (wanted(model, [f"{block}.{name}"], X) for name in names)
    half = rank // 2
    exact = torch.cat((q[..., 8 * rank :][..., :8], k[..., 8 * half :][..., :8], v[..., 8 * half :][..., :8]), -1)
    torch.testing.assert_close(layer(X).double(), exact, atol=1e-4, rtol=1e-4)


def test_inputs_split_over_processes_add_up(plugin: Any, llama: Any) -> None:
    model, raw, path = llama
    config, name = config_of(plugin, raw), "model.layers.0.self_attn.o_proj"
    assert raw["layers"][name]["form"] == "aligned"
    parts = [
        served(plugin, config, path, name, [32], 32, tp=(rank, 2), rows=True)(X[..., 16 * rank :][..., :16])
        for rank in (0, 1)
    ]
    torch.testing.assert_close((parts[0] + parts[1]).double(), wanted(model, [name], X), atol=1e-4, rtol=1e-4)


def test_biases_of_opt(plugin: Any, tmp_path: Path) -> None:
    model, raw = export("opt", tmp_path)
    config = config_of(plugin, raw)
    parent = next(name for name in raw["layers"] if name.endswith("q_proj")).rpartition(".")[0]
    names = PACKED["qkv_proj"]
    layer = served(plugin, config, tmp_path, f"{parent}.qkv_proj", [32, 32, 32], 32, names=names, bias=True)
    exact = wanted(model, [f"{parent}.{name}" for name in names], X)
    torch.testing.assert_close(layer(X).double(), exact, atol=1e-4, rtol=1e-4)


def test_a_tensor_that_did_not_come_is_missed(plugin: Any, llama: Any) -> None:
    _, raw, path = llama
    name = "model.layers.0.self_attn.o_proj"
    with pytest.raises(
        FlexrankError, match=r"model\.layers\.0\.self_attn\.k_proj\.\S+ is missing in the model's files"
    ):
        served(
            plugin,
            config_of(plugin, raw),
            path,
            name.replace("o_proj", "qkv_proj"),
            [32, 16, 16],
            32,
            names=["q_proj"],
        )


def test_a_layer_that_is_fused_in_its_files(plugin: Any, tmp_path: Path) -> None:
    model, raw = export("phi3", tmp_path)
    config = plugin.registered["flexrank"].from_config(raw)
    config.packed_modules_mapping.update({"qkv_proj": ["qkv_proj"]})
    name = next(name for name, spec in raw["layers"].items() if name.endswith("qkv_proj") and spec["form"] == "aligned")
    layer = served(plugin, config, tmp_path, name, [32, 16, 16], 32)
    torch.testing.assert_close(layer(X).double(), wanted(model, [name], X), atol=1e-4, rtol=1e-4)
    with pytest.raises(FlexrankError, match="fused in its files, so no tensor parallelism"):
        LinearBase(config, name, [32, 16, 16], 32, bias=False, tp=(0, 2), rows=False)


@pytest.mark.parametrize("tp", [(0, 1), (0, 2), (1, 2)])
def test_a_head_of_a_padded_vocabulary(plugin: Any, tp: tuple[int, int]) -> None:
    u, v = torch.randn(50, 6, dtype=torch.float64), torch.randn(32, 6, dtype=torch.float64)
    from flexrank.nn.gauge_aligned import GaugeAlignedLinear

    files = GaugeAlignedLinear.from_factors(u, v, slack=2, dtype=torch.float32)
    spec = {"form": "aligned", "shape": [50, 32], "rank": 6, "aligned": files.aligned, "bias": False}
    config = config_of(plugin, {"format": 1, "layers": {"lm_head": spec}})
    head = ParallelLMHead(config, "lm_head", 50, 32, tp)
    for name, values in files.state_dict().items():
        parameter = head.get_parameter(name)
        parameter.weight_loader(parameter, values)
    logits = head.quant_method.apply(head, X)
    exact = torch.nn.functional.pad(X.double() @ v @ u.T, (0, 14))
    size = 64 // tp[1]
    assert logits.shape[-1] == size
    torch.testing.assert_close(logits.double(), exact[..., tp[0] * size :][..., :size], atol=1e-4, rtol=1e-4)


def test_what_it_leaves_to_vllm_and_what_it_refuses(plugin: Any) -> None:
    aligned = {"form": "aligned", "shape": [8, 8], "rank": 2, "aligned": 1, "bias": False}
    dense = {"form": "dense", "shape": [8, 8], "rank": 8, "bias": False}
    layers = {"a.q_proj": dense, "b.experts.0.down": aligned, "c": aligned}
    config = config_of(plugin, {"format": 1, "layers": layers})
    plain = LinearBase.__new__(LinearBase)
    for prefix in ("a.qkv_proj", "a.o_proj"):
        assert isinstance(config.get_quant_method(plain, prefix), Unquantized)
    assert config.get_quant_method(ParallelLMHead.__new__(ParallelLMHead), "lm_head") is None
    assert config.get_quant_method(nn.Module(), "a.attn") is None
    with pytest.raises(
        FlexrankError, match="vLLM builds b.experts.0.down inside a Module; serve an export `--to dense`"
    ):
        config.get_quant_method(nn.Module(), "b.experts")
    config.apply_vllm_mapper(
        types.SimpleNamespace(apply_dict=lambda values: {f"m.{name}": one for name, one in values.items()})
    )
    assert type(config.get_quant_method(plain, "m.c")).__name__ == "FactorisedLinearMethod"
    with pytest.raises(FlexrankError, match="config.json holds layers of format 2; "):
        plugin.registered["flexrank"].from_config({"format": 2, "layers": {}})


@pytest.mark.parametrize(
    ("kind", "own"), [("bloom", "query_key_value"), ("llama4", "q_proj"), ("llama4_text", "k_proj")]
)
def test_layers_that_vllm_rearranges_are_refused(plugin: Any, kind: str, own: str) -> None:
    """vLLM permutes every tensor below these attention layers by head, also factors, whose rows are not heads."""
    aligned = {"form": "aligned", "shape": [8, 8], "rank": 2, "aligned": 1, "bias": False}
    layers = {"h.0.down": aligned, f"h.0.{own}": aligned}
    this, other = types.SimpleNamespace(model_type=kind), types.SimpleNamespace(model_type="llama")
    config = config_of(plugin, {"format": 1, "layers": layers})
    config.maybe_update_config("small/", hf_config=other, revision=None)
    with pytest.raises(FlexrankError, match=f"small/: vLLM rearranges h.0.{own} of {kind} as if it were a matrix"):
        config.maybe_update_config("small/", hf_config=this, revision=None)
    layers[f"h.0.{own}"] = aligned | {"form": "dense"}
    config_of(plugin, {"format": 1, "layers": layers}).maybe_update_config("small/", hf_config=this, revision=None)
