"""Deployed models for other runtimes: the deployed model's outputs are the oracle, on batches that were not traced."""

import functools
import importlib.util
import json
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import flexrank as fr
import tiny
from flexrank.artefacts.elastic import save_elastic
from flexrank.cli import app
from flexrank.deployment import formats, runtimes
from flexrank.deployment.dense import dense_model
from flexrank.deployment.exports import relative_difference
from flexrank.deployment.formats import BOUNDS, FORMATS, export_to, read_export
from flexrank.deployment.runtimes import program_of, sample_inputs
from flexrank.errors import FlexrankError
from flexrank.files import FORMAT, write_document
from tiny import outputs, relative

NAMES = ("llama_tied", "gpt2", "bert", "qwen3", "phi3", "vit")
HOME = Path(fr.__file__).parent  #: no export holds a path of this machine
#: Rows and tokens that no export has seen.
OTHER = (5, 21)
#: What plain transformers computes, in a process where flexrank cannot be imported.
PLAIN = """
import sys
from importlib import metadata
sys.modules["flexrank.hf"] = sys.modules["flexrank"] = None
import torch, transformers
from pathlib import Path
from safetensors.torch import load_file, save_file
for place in map(Path, sys.argv[1:]):
    config = transformers.AutoConfig.from_pretrained(place)
    model, report = getattr(transformers, config.architectures[0]).from_pretrained(place, output_loading_info=True)
    assert not any(report.values()), report
    kinds = sorted({type(module).__name__ for module in model.modules()} & {"Linear", "Conv1D", "Conv2d"})
    with torch.no_grad():
        output = model(**load_file(place.parent / f"{place.name}.inputs"))
    value = output.logits if hasattr(output, "logits") else output.last_hidden_state
    save_file({"output": value.contiguous()}, place.parent / f"{place.name}.outputs")
    print(place.name, *kinds)
assert sys.modules.pop("flexrank") is None and not [name for name in sys.modules if name.startswith("flexrank.n")]
"""


@functools.cache
def _deployed(name: str, dtype: torch.dtype) -> Any:
    return tiny.deployed(name, dtype=dtype)


def written(name: str, place: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A deployed model that transformers has saved in `place`."""
    small = _deployed(name, dtype)
    small.save_pretrained(place)
    return small


def check(name: str, to: str, place: Path) -> dict[str, Any]:
    """Exports the network, and compares it on another batch than those that the export was verified on."""
    small = written(name, place / "small")
    facts = export_to(place / "small", to, place / "out")
    assert facts == {key: json.loads((place / "out/export.json").read_text())[key] for key in facts}
    assert facts["error"] <= facts["bound"] == BOUNDS[to][torch.float32]
    batch = sample_inputs(small, *OTHER, seed=7)
    assert relative(read_export(place / "out", to)(batch), outputs(small, batch)) < 1e-5
    assert sorted(path.name for path in place.iterdir()) == ["out", "small"]
    assert not any(str(HOME).encode() in path.read_bytes() for path in (place / "out").rglob("model.*"))
    return facts


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_plain_transformers_loads_what_is_dense_without_flexrank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    wanted = {}
    with caplog.at_level(logging.INFO, "flexrank"):
        for name in NAMES:
            small = written(name, tmp_path / "small" / name)
            export_to(tmp_path / "small" / name, "dense", tmp_path / name)
            batch = sample_inputs(small, *OTHER, seed=7)
            save_file(batch, tmp_path / f"{name}.inputs")
            wanted[name] = outputs(small, batch)
    assert caplog.text.count("as large and as slow as the base model") == len(NAMES)
    done = fresh(PLAIN, *(tmp_path / name for name in NAMES))
    kinds = dict(line.split(" ", 1) for line in done.splitlines())
    assert kinds == dict.fromkeys(NAMES, "Linear") | {"gpt2": "Conv1D Linear", "vit": "Conv2d Linear"}
    for name in NAMES:
        assert relative(load_file(tmp_path / f"{name}.outputs")["output"], wanted[name]) < 1e-5
        stored = load_file(tmp_path / name / "model.safetensors")
        assert stored.keys() == stored_names(name, tmp_path)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert not {"quantization_config", "auto_map"} & config.keys() and config["architectures"]


def stored_names(name: str, place: Path) -> set[str]:
    """The names that transformers gives the original network's tensors in a file."""
    from safetensors.torch import load_file

    tiny.build(name).save_pretrained(place / "base" / name)
    return set(load_file(place / "base" / name / "model.safetensors"))


def fresh(script: str, *arguments: object) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dense_form_keeps_its_dtype_and_is_within_that_dtypes_bound(tmp_path: Path, dtype: torch.dtype) -> None:
    written("llama_tied", tmp_path / "small", dtype=dtype)
    facts = export_to(tmp_path / "small", "dense", tmp_path / "out")
    assert facts["dtype"] == str(dtype).removeprefix("torch.") and 0 < facts["error"] <= BOUNDS["dense"][dtype]


@pytest.mark.parametrize("name", tiny.PROGRAMS["torch"])
def test_torch_runs_the_program_for_any_batch(name: str, tmp_path: Path) -> None:
    check(name, "torch", tmp_path)


@pytest.mark.parametrize("name", tiny.PROGRAMS["onnx"])
def test_onnxruntime_runs_the_program_for_any_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two is taken for larger than a file may be: its weights lie beside it."""
    import onnxruntime

    if name == "gpt2":
        monkeypatch.setattr(runtimes, "ONE_FILE_BYTES", 0)
    assert check(name, "onnx", tmp_path)["inputs"] == ["input_ids", "attention_mask"]
    session = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"), providers=["CPUExecutionProvider"])
    shapes = {one.name: one.shape for one in (*session.get_inputs(), *session.get_outputs())}
    axes = ["batch", "sequence"]
    assert shapes == {"input_ids": axes, "attention_mask": axes, "output": [*axes, tiny.VOCABULARY]}
    assert (tmp_path / "out/model.onnx.data").is_file() == (name == "gpt2")


@pytest.mark.parametrize(
    ("to", "name"), [(to, name) for to in ("openvino", "executorch") for name in tiny.PROGRAMS[to]]
)
def test_other_runtimes_run_the_program_for_any_batch(to: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip(to, reason=f"{to} is not installed")
    check(name, to, tmp_path)


def test_half_precision_becomes_float32_where_the_runtime_knows_nothing_less(tmp_path: Path) -> None:
    written("llama_tied", tmp_path / "small", dtype=torch.bfloat16)
    assert formats._loaded(tmp_path / "small", "onnx").dtype == torch.float32
    assert formats._loaded(tmp_path / "small", "torch").dtype == torch.bfloat16


def test_what_belongs_to_the_model_travels_along_and_what_is_flexranks_does_not(tmp_path: Path) -> None:
    written("llama_tied", tmp_path / "small")
    kept = ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja", "generation_config.json")
    for name in (*kept, "README.md", "modeling_flexrank.py"):
        (tmp_path / "small" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "small" / name).write_text(f'{{"eos_token_id": {len(name)}}}')
    for name in ("checkpoint-5/optimizer.pt", "training_args.bin", "torch/model.pt2", "torch/export.json"):
        (tmp_path / "small" / name).parent.mkdir(exist_ok=True)
        write_document(tmp_path / "small" / name, "export", {})
    export_to(tmp_path / "small", "dense", tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {*kept, "README.md", "config.json", "model.safetensors", "export.json"}
    assert "# LlamaForCausalLM for dense" in (tmp_path / "out" / "README.md").read_text()
    assert all((tmp_path / "out" / name).read_bytes() == (tmp_path / "small" / name).read_bytes() for name in kept)


def test_an_exports_card_says_which_size_it_is(tmp_path: Path) -> None:
    written("llama_tied", tmp_path / "small")
    about = "9,631 parameters, then trained by itself for 3 steps."
    (tmp_path / "small/README.md").write_text(f"---\nlicense: mit\n---\n# mine at 0.5\n\n{about}\n\n```python\n```\n")
    export_to(tmp_path / "small", "dense", tmp_path / "dense")
    card = (tmp_path / "dense" / "README.md").read_text()
    assert f"# mine at 0.5 for dense\n\n{about}\n\n`flexrank export --to dense`" in card and "license: mit" in card
    assert "as large as the base model" in card


def shifted(directory: Path, format: str) -> Any:
    run = read_export(directory, format)
    return lambda inputs: run(inputs) * (1 + (3e-4 if len(inputs["input_ids"]) == 1 else 0))


def not_finite(directory: Path, format: str) -> Any:
    run = read_export(directory, format)
    return lambda inputs: run(inputs) * (float("nan") if len(inputs["input_ids"]) == 1 else 1)


def failing(*_: object) -> None:
    raise NotImplementedError("no such operator: aten::odd\nand a long story")


@pytest.mark.parametrize(
    ("place", "instead", "message"),
    [
        ("read_export", shifted, "outputs differ by 3.0e-04, above the bound 1.0e-04 of dense in torch.float32"),
        ("read_export", not_finite, "outputs differ by nan"),
        ("dense_model", failing, "dense cannot express LlamaForCausalLM: no such operator: aten::odd; nothing was"),
    ],
)
def test_a_failed_export_leaves_the_old_one(
    place: str, instead: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("llama_tied", tmp_path / "small")
    export_to(tmp_path / "small", "dense", tmp_path / "out")
    (tmp_path / "out" / "old").write_text("old")
    monkeypatch.setattr(formats, place, instead)
    with pytest.raises(FlexrankError, match=message):
        export_to(tmp_path / "small", "dense", tmp_path / "out")
    assert (tmp_path / "out" / "old").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "small"]
    monkeypatch.undo()
    export_to(tmp_path / "small", "dense", tmp_path / "out")
    assert (tmp_path / "out" / "old").is_file()  # which is no export's


def test_the_command_prints_the_place_or_json(tmp_path: Path) -> None:
    written("bert", tmp_path / "small")
    result = invoke(tmp_path / "small", "--to", "dense")
    assert result.exit_code == 0 and result.stdout.split() == [str(tmp_path / "small-dense")]
    result = invoke(tmp_path / "small", "--to", "dense", "--output", tmp_path / "out", "--json")
    facts = json.loads(result.stdout)
    assert facts["directory"] == str(tmp_path / "out") and facts["to"] == "dense" and facts["class"] == "BertModel"


def test_an_export_is_inspected_as_what_it_is(tmp_path: Path) -> None:
    written("bert", tmp_path / "small")
    facts = export_to(tmp_path / "small", "torch", tmp_path / "out")
    summary = fr.inspect_artefact(tmp_path / "out")
    shared = ("to", "class", "dtype", "inputs", "bound", "error", "versions")
    assert {key: summary[key] for key in shared} == {key: facts[key] for key in shared}
    stored = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert (summary["kind"], summary["bytes_on_disk"]) == ("export", stored)
    lines = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")]).stdout
    assert "BertModel for torch, float32" in lines and "takes input_ids, attention_mask" in lines
    assert f"within {facts['error']:.1e} of" in lines and f"torch {metadata.version('torch')}" in lines
    document = json.loads((tmp_path / "out/export.json").read_text())
    assert document["format"] == FORMAT, "the format of the document, which tells a later version how to read it"
    (tmp_path / "out/export.json").write_text(json.dumps(document | {"to": "onnx"}))
    with pytest.raises(FlexrankError, match=r"export.json: does not match its checksum"):
        fr.inspect_artefact(tmp_path / "out")


def test_wrong_inputs_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("bert", tmp_path / "small")
    tiny.build("bert").save_pretrained(tmp_path / "base")
    elastic = tiny.elastic("bert")
    save_elastic(elastic, tiny.chain_of(elastic), tmp_path / "elastic")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else find(name))
    for arguments, message in (
        (["small", "--to", "gguf"], "format 'gguf' is unknown; it is one of dense, torch, onnx, openvino, executorch"),
        (["small", "--to", "onnx"], "onnx is not installed: pip install 'flexrank[onnx]'"),
        (["elastic", "--to", "dense"], "elastic: an elastic artefact with all sizes; write one of its sizes with"),
        (["base", "--to", "dense"], "base: not an artefact of flexrank"),
        (["nowhere", "--to", "dense"], "nowhere: no such directory"),
        (["small", "--to", "dense", "--output", tmp_path / "full"], "full: holds other files, and no export.json"),
        (["small", "--to", "dense", "--output", tmp_path / "small"], "small: holds other files, and no export.json"),
    ):
        result = invoke(tmp_path / str(arguments[0]), *arguments[1:])
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
        assert result.stderr.startswith("error: ") and message in result.stderr, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "elastic", "full", "small"]


def test_a_model_of_torch_and_an_encoder_decoder_are_named(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    from flexrank import save_deployed

    save_deployed(tiny.deployed("perceptron"), tmp_path / "small", factory="tiny:perceptron")
    with pytest.raises(FlexrankError, match="holds a Sequential of torch"):
        export_to(tmp_path / "small", "dense", tmp_path / "out")
    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    with pytest.raises(
        FlexrankError, match="T5ForConditionalGeneration is an encoder-decoder, which can be exported only"
    ):
        program_of(model)
    model.main_input_name = "input_features"
    with pytest.raises(FlexrankError, match="T5ForConditionalGeneration is a model of input_features; exports are of"):
        sample_inputs(model, 2, 8)


def test_samples_fit_the_model() -> None:
    text = sample_inputs(tiny.build("bert"), 2, 100)
    assert text["input_ids"].shape == (2, 64) and int(text["input_ids"].max()) < tiny.VOCABULARY
    assert text["attention_mask"].tolist() == [[1] * 64, [1] * 48 + [0] * 16]
    assert torch.equal(sample_inputs(tiny.build("bert"), 2, 100)["input_ids"], text["input_ids"])
    assert sample_inputs(tiny.build("t5"), 2, 9)["decoder_input_ids"].shape == (2, 5) and len(text) == 2
    image = sample_inputs(tiny.build("vit").bfloat16(), 2, 100)["pixel_values"]
    assert image.shape == (2, 3, 16, 16) and image.dtype == torch.bfloat16
    assert program_of(tiny.build("llama_tied")).model.config.use_cache is False


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    written("bert", tmp_path / "bert")
    small, config = formats._loaded(tmp_path / "bert", "dense"), tmp_path / "bert/config.json"
    for key, value, message in (
        ("vocab_size", 65, "tensor 'embeddings.word_embeddings.weight' of BertModel has no counterpart"),
        ("intermediate_size", 40, "layer 'encoder.layer.0.intermediate.dense' does not fit its Linear"),
    ):
        before = config.read_text()
        config.write_text(json.dumps(json.loads(before) | {key: value}))
        with pytest.raises(FlexrankError, match=message):
            dense_model(small, tmp_path / "bert")
        config.write_text(before)
    export_to(tmp_path / "bert", "dense", tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    del tensors["pooler.dense.bias"]
    save_file(tensors, tmp_path / "out/model.safetensors", {"format": "pt"})
    with pytest.raises(FlexrankError, match=r"missing_keys on reloading \(pooler.dense.bias"):
        read_export(tmp_path / "out", "dense")


def test_outputs_of_another_shape_are_no_small_difference() -> None:
    with pytest.raises(FlexrankError, match=r"have shape \(1,\), not \(4,\)"):
        relative_difference(torch.ones(1), torch.ones(4))


def test_every_format_has_a_bound_and_every_package_an_extra() -> None:
    import tomllib

    from flexrank.cli.exits import EXTRAS

    assert tuple(BOUNDS) == FORMATS
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for name, runtime in runtimes.RUNTIMES.items():
        for package in runtime.packages:
            assert EXTRAS[package] == name
            assert any(one.startswith(f"{package}>=") for one in project["optional-dependencies"][name])
