"""torchao on a deployed model, by the code of docs/deployment.md: all its layers in 8 or 4 bits, and the bytes held."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from flexrank.artefacts.deployed import load_deployed, save_deployed
from flexrank.artefacts.elastic import save_elastic
from flexrank.artefacts.inspect import inspect_artefact
from flexrank.deployment import deploy, export
from flexrank.deployment.formats import export_to
from flexrank.errors import FlexrankError
from flexrank.hf.models import attached_layers as specs_of
from tiny import DECODER, batch_for, build, chain_of, deployed, nest, outputs, partly_dense, relative

pytest.importorskip("torchao")
# torchao's own, as it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

DOCUMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


def blocks_of_the_page() -> list[str]:
    section = DOCUMENT.read_text(encoding="utf8").partition("## Quantisation")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def require_rounded(found: torch.nn.Module, part: torch.nn.Linear, group: int, levels: int | None = None) -> None:
    """Each weight is within half a step, of which a group's largest weight is so many, or 15 its range."""
    eye = torch.eye(part.in_features, dtype=part.weight.dtype)
    values, wanted = found(eye).T.unflatten(1, (-1, group)), part.weight.unflatten(1, (-1, group))
    least, most = wanted.aminmax(dim=-1, keepdim=True)
    largest = wanted.abs().amax(-1, keepdim=True)
    steps = (most - least) / 15 if levels is None else largest / (levels + 0.5)
    rounding = 2 * torch.finfo(wanted.dtype).eps  # of the scale, and of the product with it
    assert ((values - wanted).abs() <= 0.51 * steps + rounding * largest).all() and not values.equal(wanted)


def held_bytes(weight: Any) -> int:
    """Of all tensors that a tensor of torchao's is made of."""
    return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])


@pytest.mark.parametrize("bits", [8, 6, 4, 3])
def test_weights_of_few_bits_are_held_as_a_byte_each(bits: int) -> None:
    """96 rows of 64: 192 groups, each with a scale of four bytes and a zero point of one."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    layer = torch.nn.Linear(64, 96)
    quantize_(layer, IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(32)))
    assert held_bytes(layer.weight) == 64 * 96 + (4 + 1) * 192


def test_the_first_code_of_the_page_rounds_both_factors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flexrank.deployment import exports
    from tiny_runs import here

    monkeypatch.setattr(exports, "in_fresh_process", here)
    monkeypatch.chdir(tmp_path)
    batch, names = batch_for("llama_untied"), dict[str, Any]()
    export(partly_dense("llama_untied"), tmp_path / "small", batch)
    exec(blocks_of_the_page()[0], names)
    before = transformers.AutoModelForCausalLM.from_pretrained("small")
    low = dict(names["small"].named_modules())
    linear = {name: part for name, part in before.named_modules() if isinstance(part, torch.nn.Linear)}
    assert {name.rpartition(".")[2] for name in linear} == {"latent", "expand", "q_proj"}  # which this size keeps dense
    for name, part in linear.items():
        if name.startswith("lm_head"):
            assert low[name].weight.equal(part.weight)
        else:
            require_rounded(low[name], part, part.in_features, levels=127)
    assert 1e-4 < relative(outputs(names["small"], batch), outputs(before, batch)) < 0.2
    assert torch.equal(outputs(names["again"], batch), outputs(names["small"], batch))
    export(names["again"], tmp_path / "exported", batch)  # raises unless what it reads again has equal outputs
    for directory in ("small-int8", "exported"):
        stored = load_file(Path(directory) / "model.safetensors")
        bytes_each = {name: stored[f"{name}._weight_qdata"] for name in linear if not name.startswith("lm_head")}
        assert {one.dtype for one in bytes_each.values()} == {torch.int8}
        assert not any(f"{name}.weight" in stored for name in bytes_each)
    assert specs_of(names["again"]) == specs_of(before) and inspect_artefact("small-int8")["layers"]
    with pytest.raises(FlexrankError, match="exported: holds quantised weights; export the size as it was before"):
        export_to("exported", "dense", tmp_path / "dense")


@pytest.mark.parametrize("name", ["IntxWeightOnlyConfig", "Int8WeightOnlyConfig"])
def test_a_size_that_is_quantised_whole_is_read_by_other_classes_and_in_other_dtypes(name: str, tmp_path: Path) -> None:
    """Its head was tied to the embedding, which stays as it is."""
    import torchao.quantization as ao

    small, batch = deployed("llama_tied"), batch_for("llama_tied")
    ao.quantize_(small, getattr(ao, name)(*([torch.int8] if name.startswith("Intx") else [])))
    small.save_pretrained(tmp_path / "small")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(outputs(again, batch), outputs(small, batch))
    bare = transformers.AutoModel.from_pretrained(tmp_path / "small")
    assert torch.equal(bare(**batch).last_hidden_state, small.model(**batch).last_hidden_state)
    short = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.bfloat16)
    assert relative(outputs(short, batch), outputs(small, batch)) < 0.05
    assert short.model.rotary_emb.inv_freq.dtype == torch.float32
    short.save_pretrained(tmp_path / "short")
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "short", dtype="auto")
    assert torch.equal(outputs(third, batch), outputs(short, batch))


@pytest.mark.parametrize("name", ["llama_tied", "llama_untied"])
def test_a_quantised_embedding_whose_head_is_not(name: str, tmp_path: Path) -> None:
    import torchao.quantization as ao

    small, batch = deployed(name), batch_for(name)
    ao.quantize_(small, ao.IntxWeightOnlyConfig(torch.int8), lambda part, _: isinstance(part, nn.Embedding))
    small.save_pretrained(tmp_path / "small")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(outputs(again, batch), outputs(small, batch))
    if name == "llama_tied":
        small.lm_head.weight = small.model.embed_tokens.weight
        with pytest.raises(
            FlexrankError, match=r"LlamaForCausalLM ties lm_head\.weight, which cannot be saved quantised"
        ):
            small.save_pretrained(tmp_path / "tied")
        assert not (tmp_path / "tied" / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "tied"), [("t5", r"encoder\.\S+, decoder\.\S+, lm_head\.weight"), ("bert", r"\S+\.weight, \S+\.bias")]
)
def test_a_head_that_is_tied_by_more_than_its_weight_stays_as_it_is(name: str, tied: str, tmp_path: Path) -> None:
    """A masked language model's bias is tied too, and the encoder's embedding is the decoder's."""
    import torchao.quantization as ao

    torch.manual_seed(0)
    config = {key: DECODER[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    bert = transformers.BertConfig(**config, num_hidden_layers=1, max_position_embeddings=64)
    elastic = nest(build("t5") if name == "t5" else transformers.BertForMaskedLM(bert).eval())
    small, whole = (deploy(elastic, chain_of(elastic).at(0.5)) for _ in range(2))
    kind, batch = type(small), batch_for("t5" if name == "t5" else "llama_tied")
    ao.quantize_(whole, ao.Int8WeightOnlyConfig())
    with pytest.raises(FlexrankError, match=f"{kind.__name__} ties {tied}, which cannot be saved quantised; leave its"):
        whole.save_pretrained(tmp_path / "whole")
    head = set(small.get_output_embeddings().modules())
    ao.quantize_(small, ao.Int8WeightOnlyConfig(), lambda part, _: isinstance(part, nn.Linear) and part not in head)
    small.save_pretrained(tmp_path / "small")
    assert torch.equal(outputs(kind.from_pretrained(tmp_path / "small"), batch), outputs(small, batch))


def test_a_quantised_head_of_a_class_that_ties_by_its_whole_config(tmp_path: Path) -> None:
    """Whisper's `get_text_config` is another object than its config."""
    import torchao.quantization as ao

    config = transformers.WhisperConfig(
        vocab_size=64, num_mel_bins=16, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20, pad_token_id=0,
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = nest(transformers.WhisperForConditionalGeneration(config).eval())
    small = deploy(model, chain_of(model).at(0.5))
    ao.quantize_(small, ao.Int8WeightOnlyConfig())
    small.save_pretrained(tmp_path / "small")
    again = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "small")
    batch = {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": torch.randint(3, 64, (2, 5))}
    assert torch.equal(again(**batch).logits, small(**batch).logits)


def test_a_quantised_encoder_that_is_half_of_a_tied_model_is_stored(tmp_path: Path) -> None:
    import torchao.quantization as ao

    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    model = nest(transformers.T5EncoderModel(config).eval())
    small, ids = deploy(model, chain_of(model).at(0.5)), torch.randint(3, 64, (2, 5))
    ao.quantize_(small, ao.Int8WeightOnlyConfig())
    small.save_pretrained(tmp_path / "small")
    again = transformers.T5EncoderModel.from_pretrained(tmp_path / "small")
    assert torch.equal(again(ids).last_hidden_state, small(ids).last_hidden_state)


def test_a_quantised_network_without_embeddings_is_stored(tmp_path: Path) -> None:
    import torchao.quantization as ao

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    network = nest(transformers.ResNetForImageClassification(config).eval())
    small = deploy(network, chain_of(network).at(0.8))
    ao.quantize_(small, ao.Int8WeightOnlyConfig())
    small.save_pretrained(tmp_path / "small")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "small")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images).logits, small(images).logits)


def test_an_elastic_model_of_which_other_layers_are_quantised_is_not_deployed() -> None:
    import torchao.quantization as ao

    elastic = nest(nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 4)), include=["0"])
    ao.quantize_(elastic, ao.IntxWeightOnlyConfig(torch.int8))
    with pytest.raises(FlexrankError, match="Sequential has quantised weights; quantise its deployed sizes"):
        deploy(elastic, {"0": 4})


class Scaled(nn.Sequential):
    """Has a parameter whose name has no dot."""

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_a_quantised_module_is_stored(name: str, tmp_path: Path) -> None:
    """Its two hidden layers have the same shapes, and torchao's tensors have no address by which they differ."""
    import torchao.quantization as ao

    sizes = [nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 5)]
    small = deploy(nest(Scaled(*sizes)), {"0": 4, "1": 4, "2": 4, "3": 5})  # the last one is dense
    ao.quantize_(small, getattr(ao, name)())
    save_deployed(small, tmp_path / "small")
    bare, batch = Scaled(*(nn.Linear(one.in_features, one.out_features) for one in sizes)), torch.randn(7, 12)
    again = load_deployed(tmp_path / "small", model=bare)
    assert torch.equal(again(batch), small(batch))
    assert [type(one) for one in again.state_dict().values()] == [type(one) for one in small.state_dict().values()]
    layer = nn.Linear(4, 8)
    ao.quantize_(layer, getattr(ao, name)())
    with pytest.raises(FlexrankError, match="'weight' is quantised, and the model itself is its layer"):
        save_deployed(layer, tmp_path / "layer")
    elastic = nest(nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 4)), include=["0"])
    ao.quantize_(elastic, getattr(ao, name)())
    with pytest.raises(FlexrankError, match="Sequential has quantised weights; quantise its deployed sizes"):
        save_elastic(elastic, chain_of(elastic), tmp_path / "elastic")


def test_the_second_code_of_the_page_packs_two_weights_in_a_byte(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At this size every rank is 32 but the head's."""
    sizes = DECODER | {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}
    torch.manual_seed(0)
    model = nest(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval())
    save_elastic(model, chain_of(model, (0.44,)), tmp_path / "elastic")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, second = blocks_of_the_page()
    exec(first.partition("small =")[0] + second, names)
    before = transformers.AutoModelForCausalLM.from_pretrained(
        "elastic", quantization_config=names["size"], dtype=torch.bfloat16
    )
    low = dict(names["small"].named_modules())
    packed = [name for name, part in before.named_modules() if names["is_packed"](part, name)]
    assert len(packed) == 2 * 7 * 2 and not any(name.startswith("lm_head") for name in packed)
    for name, part in before.named_modules():
        if name in packed:
            require_rounded(low[name], part, 32)
            assert held_bytes(low[name].weight) == part.weight.numel() / 2 + 4 * part.weight.numel() / 32
        elif isinstance(part, torch.nn.Linear):
            assert low[name].weight.equal(part.weight)
    batch = batch_for("llama_untied")
    assert relative(outputs(names["small"], batch), outputs(before, batch)) < 0.3
    with pytest.raises(FlexrankError, match=r"weight' is quantised as \w+, which torchao does not store in files"):
        names["small"].save_pretrained("packed")
