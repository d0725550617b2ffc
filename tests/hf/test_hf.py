"""Deployed transformers models through transformers' own saving and loading, here and in fresh processes."""

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file

import tiny
from flexrank import hf
from flexrank.cli.exits import EXTRAS
from flexrank.data.batches import call_model
from flexrank.deployment import export
from flexrank.errors import FlexrankError
from flexrank.hf import meta, models
from flexrank.hf.classes import class_for
from flexrank.nn.gauge_aligned import GaugeAlignedLayer
from flexrank.nn.specs import layer_spec
from tiny import AUTO, agree, flip_a_bit, outputs, same_state

NAMES = list(tiny.ARCHITECTURES)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Every small model saved by transformers alone, beside its inputs and outputs: {name: (model, directory)}."""
    root = tmp_path_factory.mktemp("saved")
    models_saved = {}
    for name in NAMES:
        small, batch = tiny.deployed(name), tiny.batch_for(name)
        small.save_pretrained(root / name)
        save_file(batch | {"expected": outputs(small, batch)}, root / f"{name}.safetensors")
        models_saved[name] = (small, root / name)
    return models_saved


def specs_of(model):
    """The specs of the gauge-aligned layers by name."""
    modules = model.named_modules()
    return {name: layer_spec(layer) for name, layer in modules if isinstance(layer, GaugeAlignedLayer)}


def fresh(script, *arguments):
    """The words that a script prints in a new interpreter."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("name", ["bert", "llama_tied"])
def test_a_saved_model_comes_back_to_the_same_bits(name, saved):
    """`test_compatibility` has all architectures."""
    small, directory = saved[name]
    again, report = getattr(transformers, AUTO[name]).from_pretrained(directory, output_loading_info=True)
    assert not any(report.values())
    assert type(again) is type(small) and same_state(again, small)
    assert [key for key, _ in again.named_parameters()] == [key for key, _ in small.named_parameters()]  # and ties
    batch = tiny.batch_for(name)
    assert agree(outputs(again, batch), outputs(small, batch))
    assert specs_of(again) == specs_of(small) != {}
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert next(again.half().parameters()).dtype == torch.float16  # transformers forbids it for quantized models


def test_transformers_own_loading_notices_a_flipped_bit(tmp_path, verified_here):
    export(torch.nn.DataParallel(tiny.deployed("bert")), tmp_path / "small", tiny.batch_for("bert"))
    flip_a_bit(tmp_path / "small" / "model.safetensors", -3)
    message = "model.safetensors: does not match its checksum.*then delete flexrank.json"
    with pytest.raises(FlexrankError, match=message):
        transformers.AutoModel.from_pretrained(tmp_path / "small")
    (tmp_path / "small" / "flexrank.json").unlink()
    transformers.AutoModel.from_pretrained(tmp_path / "small")


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_a_loaded_model_saves_itself_again(name, saved, tmp_path):
    small, directory = saved[name]
    auto = getattr(transformers, AUTO[name])
    auto.from_pretrained(directory).save_pretrained(tmp_path / "again", max_shard_size="10KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    assert same_state(auto.from_pretrained(tmp_path / "again"), small)


def test_hidden_states_are_returned_inside_the_block_alone():
    first, second = tiny.build("llama_untied"), tiny.build("gpt2")
    second.config.output_hidden_states = True
    inner = SimpleNamespace(output_hidden_states=False)  # as of Gemma 3, which reads its text model's
    nested = SimpleNamespace(output_hidden_states=False, get_text_config=lambda: inner)
    with models.hidden_states(SimpleNamespace(config=nested)):
        assert inner.output_hidden_states
    assert not inner.output_hidden_states and not nested.output_hidden_states
    with models.hidden_states(first, second):
        for model, name in ((first, "llama_untied"), (second, "gpt2")):
            output = call_model(model, tiny.batch_for(name))
            assert torch.equal(model.get_output_embeddings()(output.hidden_states[-1]), output.logits)
    assert not first.config.output_hidden_states and second.config.output_hidden_states


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_generate_gives_the_same_tokens(name, saved):
    small, directory = saved[name]
    again = transformers.AutoModelForCausalLM.from_pretrained(directory)
    batch = {key: value[:1] for key, value in tiny.batch_for(name).items()}
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = small.generate(**batch, **options)
    assert wanted.shape == (1, 22) and torch.equal(again.generate(**batch, **options), wanted)
    for position in range(10, 22):  # without a cache, token by token
        logits = outputs(small, {"input_ids": wanted[:, :position]})[0, -1]
        ending = torch.tensor(small.generation_config.eos_token_id or [], dtype=torch.long).reshape(-1)
        assert logits[wanted[0, position]] >= logits.index_fill(0, ending, -torch.inf).max() - 1e-4


def test_bfloat16_is_saved_and_loaded_as_such(tmp_path):
    small = tiny.deployed("qwen3", dtype=torch.bfloat16)
    small.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = tiny.batch_for("qwen3")
    assert again.dtype == torch.bfloat16 and agree(outputs(again, batch), outputs(small, batch))


def test_a_base_loads_from_its_head_and_a_head_from_its_base(saved):
    small, directory = saved["llama_untied"]
    base = transformers.AutoModel.from_pretrained(directory)
    batch = tiny.batch_for("llama_untied")
    assert agree(outputs(base, batch), outputs(small.model, batch))
    bert, directory = saved["bert"]
    head = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    batch = tiny.batch_for("bert")
    assert agree(outputs(head.bert, batch), outputs(bert, batch))


def test_a_layer_that_the_architecture_lacks_is_named(tmp_path):
    small = tiny.deployed("bert")
    small.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    specs = config["quantization_config"]["layers"]
    specs["encoder.layer.9.output.dense"] = specs["encoder.layer.0.output.dense"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlexrankError, match=r"BertModel has no layer 'encoder\.layer\.9"):
        transformers.AutoModel.from_pretrained(tmp_path)
    config["quantization_config"]["format"] = 9
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlexrankError, match="format 9"):
        transformers.AutoModel.from_pretrained(tmp_path)


LOAD_ALL = """
import sys, pathlib, torch
IMPORTS
from safetensors.torch import load_file
torch.set_num_threads(1)
root = pathlib.Path(sys.argv[1])
for pair in sys.argv[2:]:
    name, auto = pair.split("=")
    model = getattr(transformers, auto).from_pretrained(root / name)
    batch = load_file(root / f"{name}.safetensors")
    expected = batch.pop("expected")
    with torch.no_grad():
        output = model(**batch)
    output = output.logits if hasattr(output, "logits") else output.last_hidden_state
    print(name, float((output - expected).norm() / expected.norm()) <= 1e-5)
"""


FLEXRANK_FIRST = """
import importlib.util, inspect, sys
import flexrank
from flexrank import hf
hf.register()
assert "transformers" not in sys.modules
assert importlib.util.find_spec(hf.REGISTRY).origin.endswith("auto.py")
import transformers, transformers.quantizers
auto = sys.modules[hf.REGISTRY]
assert "flexrank" in auto.AUTO_QUANTIZER_MAPPING
assert type(auto.__loader__).__name__ == type(auto.__spec__.loader).__name__ == "SourceFileLoader"
assert "def register_quantizer" in inspect.getsource(auto)
assert sum(type(finder).__name__ == "_RegistryFinder" for finder in sys.meta_path) == 1
hf.register()
"""

TRANSFORMERS_FIRST = """
import transformers, transformers.quantizers.auto as auto
assert "flexrank" not in auto.AUTO_QUANTIZER_MAPPING
import flexrank
assert "flexrank" in auto.AUTO_QUANTIZER_MAPPING and "flexrank" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
"""


@pytest.mark.parametrize("imports", [FLEXRANK_FIRST, TRANSFORMERS_FIRST], ids=["flexrank_first", "transformers_first"])
def test_every_model_loads_in_a_fresh_process(imports, saved):
    root = saved["bert"][1].parent
    printed = fresh(LOAD_ALL.replace("IMPORTS", imports), root, *(f"{name}={AUTO[name]}" for name in NAMES))
    assert printed == [word for name in NAMES for word in (name, "True")]


def test_an_unsuitable_transformers_is_one_warning_not_a_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "flexrank.hf.quantizer", None)
    with pytest.warns(UserWarning, match="needs transformers>=5.23,<6"):
        hf.register()


def test_without_flexrank_nothing_loads_with_random_weights(saved):
    script = """
    import sys, pathlib, transformers
    for pair in sys.argv[2:]:
        name, auto = pair.split("=")
        try:
            getattr(transformers, auto).from_pretrained(pathlib.Path(sys.argv[1]) / name)
        except RuntimeError as error:
            print(name, "size" in str(error) or "shape" in str(error))
    assert "flexrank" not in sys.modules
    """
    printed = fresh(script, saved["bert"][1].parent, *(f"{name}={AUTO[name]}" for name in NAMES))
    assert printed == [word for name in NAMES for word in (name, "True")]


@pytest.mark.parametrize(
    "call",
    [
        lambda path: models.load_model(path, "language"),
        models.load_tokenizer,
        models.load_by_architecture,
        models.skeleton,
        lambda path: meta.meta_model(path, "language"),
    ],
)
def test_without_transformers_the_error_names_it(call, tmp_path, monkeypatch):
    """Its dependencies are missing then too; `EXTRAS` knows the extra of transformers alone."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name in ("transformers", "huggingface_hub", "huggingface_hub.errors"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError) as error:
        call(tmp_path)
    assert EXTRAS[error.value.name] == "hf"


def test_an_export_loads_with_trusted_code_and_no_import_of_flexrank(tmp_path, verified_here):
    small, batch = tiny.deployed("llama_tied"), tiny.batch_for("llama_tied")
    export(small, tmp_path / "llama_tied", batch)
    save_file(batch | {"expected": outputs(small, batch)}, tmp_path / "llama_tied.safetensors")
    assert json.loads((tmp_path / "llama_tied" / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "modeling_flexrank.LlamaConfig",
        "AutoModel": "modeling_flexrank.LlamaModel",
        "AutoModelForCausalLM": "modeling_flexrank.LlamaForCausalLM",
        "AutoModelForQuestionAnswering": "modeling_flexrank.LlamaForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_flexrank.LlamaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_flexrank.LlamaForTokenClassification",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama_tied", "llama_tied.safetensors"]
    trusting = LOAD_ALL.replace("IMPORTS", "import transformers").replace(
        "root / name)", "root / name, trust_remote_code=True)"
    )
    trusting += """
model.save_pretrained(root / "again")
again = transformers.AutoModelForCausalLM.from_pretrained(root / "again")
assert torch.equal(again(**batch).logits, model(**batch).logits)
base = transformers.AutoModel.from_pretrained(root / "llama_tied", trust_remote_code=True)
assert type(base).__name__ == "LlamaModel" and "flexrank" in sys.modules
other = transformers.AutoModelForSequenceClassification
other = other.from_pretrained(root / "llama_tied", trust_remote_code=True, num_labels=2)
assert other.score.out_features == 2 and all(map(torch.equal, other.model.parameters(), base.parameters()))
"""
    script = f"import os; os.environ['HF_MODULES_CACHE'] = {str(tmp_path / 'modules')!r}\n" + trusting
    assert fresh(script, tmp_path, "llama_tied=AutoModelForCausalLM") == ["llama_tied", "True"]
    assert same_state(models.load_model(tmp_path / "llama_tied", "language"), small)
    flip_a_bit(tmp_path / "llama_tied" / "model.safetensors")
    with pytest.raises(FlexrankError, match="does not match its checksum"):
        models.load_model(tmp_path / "llama_tied", "language")


@pytest.mark.parametrize("name", ["llama_tied", "dinov3", "bert"])
def test_a_skeleton_is_the_architecture_with_right_buffers(name, tmp_path):
    model = tiny.build(name)
    models.save_config(model, tmp_path)
    bare = models.skeleton(tmp_path)
    assert type(bare) is type(model) and not bare.training
    buffers = dict(model.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in bare.named_buffers()) and buffers
    bare.load_state_dict(model.state_dict())  # all names and shapes are alike
    batch = tiny.batch_for(name)
    assert agree(outputs(bare, batch), outputs(model, batch))


def test_models_load_by_task(tmp_path):
    for name, task in (("bert", "embedding"), ("gpt2", "language"), ("vit", "classification")):
        model = tiny.build(name)
        model.save_pretrained(tmp_path / name)
        again = models.load_model(tmp_path / name, task)
        assert type(again) is type(model) and same_state(again, model) and not again.training
    transformers.BertForSequenceClassification(tiny.bert().config).save_pretrained(tmp_path / "sequence")
    assert type(models.load_model(tmp_path / "sequence", "classification")).__name__ == "BertForSequenceClassification"
    assert models.load_model(tmp_path / "gpt2", "language", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_half_of_an_encoder_decoder_embeds(tmp_path):
    """As sentence-t5's encoder, which no `AutoModel` loads."""
    from transformers import AutoModel, BartConfig, LongT5Config, T5Config, T5EncoderModel

    model = T5EncoderModel(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)).eval()
    model.save_pretrained(tmp_path)
    again = models.load_model(tmp_path, "embedding")
    assert type(again) is T5EncoderModel and same_state(again, model)
    assert type(meta.meta_model(tmp_path, "embedding")) is T5EncoderModel
    other = LongT5Config(architectures=["LongT5EncoderModel"])  # which the class for halves does not know
    assert class_for("embedding", other) is AutoModel
    for kind in (T5Config, BartConfig):
        with pytest.raises(
            FlexrankError, match="model '(t5|bart)': an encoder-decoder, which task 'language' does not"
        ):
            class_for("language", kind())


def test_a_save_that_fails_leaves_the_model_as_it_was(tmp_path):
    (tmp_path / "place").touch()
    small = tiny.deployed("gpt2")
    before = set(vars(small))
    with pytest.raises(OSError, match="place"):
        models.save_model(small, tmp_path / "place" / "below")
    assert set(vars(small)) == before


def test_a_full_disk_is_one_line_and_names_the_place(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device")

    small = tiny.deployed("gpt2")
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(FlexrankError, match=r"small: cannot be written \(I/O error: No space left on device\)"):
        models.save_model(small, tmp_path / "small")


def test_a_size_that_is_saved_again_names_no_module_that_is_not_there(tmp_path):
    """An export has the module beside it; transformers' own `save_pretrained` writes none."""
    models.save_model(tiny.deployed("llama_tied"), tmp_path / "small")
    assert "auto_map" in json.loads((tmp_path / "small" / "config.json").read_text())
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    small.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert same_state(again, small)
