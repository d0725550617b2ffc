"""Exports are whole and verified in a fresh process, or absent."""

import contextlib
import itertools
from importlib import metadata

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BartForSequenceClassification,
    BertConfig,
    BertForQuestionAnswering,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import tiny
from flexrank.artefacts.deployed import load_deployed, save_deployed
from flexrank.artefacts.elastic import load_elastic, save_elastic
from flexrank.artefacts.inspect import inspect_artefact
from flexrank.deployment import deploy, export, exports, runtimes
from flexrank.deployment.formats import export_to
from flexrank.errors import FlexrankError
from flexrank.nn.switch import nested_layers
from flexrank.run.cut import cut
from tiny import agree, outputs


@pytest.fixture
def convnet():
    return tiny.deployed("convnet")


def test_export_publishes_what_a_fresh_process_has_run(convnet, tmp_path):
    batch = tiny.batch_for("convnet")
    convnet.train()
    export(convnet, tmp_path / "small", batch, factory="tiny:convnet")
    assert convnet.training and convnet[1].training
    again = load_deployed(tmp_path / "small")
    assert agree(outputs(again, batch), outputs(convnet.eval(), batch))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == [
        "README.md",
        "flexrank.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(("part", "is_within"), [(0.5, True), (1.5, False)])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2**-9), (torch.bfloat16, 2**-6)],
)
def test_outputs_within_a_few_roundings_pass_and_others_do_not(dtype, bound, part, is_within, tmp_path):
    """By hand: of four ones, whose length is 2, the first is off by twice a part of the bound."""
    expected = torch.ones(4, dtype=dtype)
    reloaded = expected + 2 * part * bound * torch.tensor([1, 0, 0, 0], dtype=dtype)
    save_file({"output": reloaded}, tmp_path / "outputs")
    if is_within:
        exports._compare({}, tmp_path / "outputs", {"output": expected}, "small")
    else:
        with pytest.raises(FlexrankError, match="outputs differ by"):
            exports._compare({}, tmp_path / "outputs", {"output": expected}, "small")


def other_convnet():
    return nn.Sequential(*itertools.islice(tiny.convnet(), 6))


def shifted_convnet():
    class Shifted(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1e-3

    return Shifted(*tiny.convnet())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (shifted_convnet, "outputs differ by"),
        ("tiny:nothing", "cannot be imported"),
        ("tinier:nothing", "cannot be imported.*; put the directory of tinier on PYTHONPATH"),
        ("tiny", "not of the form"),
        (lambda: None, "cannot be imported by name; .* or its name, such as 'my_script:build'"),
        (None, "needs factory="),
    ],
)
def test_a_failed_export_leaves_nothing_behind(convnet, tmp_path, verified_here, factory, message):
    with pytest.raises(FlexrankError, match=message):
        export(convnet, tmp_path / "small", tiny.batch_for("convnet"), factory=factory)
    assert list(tmp_path.iterdir()) == []


def test_what_fails_in_a_fresh_process_leaves_nothing_behind(convnet, tmp_path):
    with pytest.raises(FlexrankError, match="failed in a fresh process.*has no layer '6'"):
        export(convnet, tmp_path / "small", tiny.batch_for("convnet"), factory=other_convnet)
    assert list(tmp_path.iterdir()) == []


def test_a_corrupted_export_leaves_the_old_one(convnet, tmp_path, verified_here, monkeypatch):
    kept = tmp_path / "small"
    export(convnet, kept, tiny.batch_for("convnet"), factory="tiny:convnet")
    (kept / "old").write_text("old")
    run = exports._load_and_run

    def corrupt_and_run(artefact, *others):
        tiny.flip_a_bit(artefact / "model.safetensors", -3)
        return run(artefact, *others)

    monkeypatch.setattr(exports, "_load_and_run", corrupt_and_run)
    with pytest.raises(FlexrankError, match="does not match its checksum"):
        export(convnet, kept, tiny.batch_for("convnet"), factory=tiny.convnet)
    assert [path.name for path in tmp_path.iterdir()] == ["small"] and (kept / "old").read_text() == "old"


def test_a_model_leaves_its_gpu_to_the_process_that_verifies_it(convnet, tmp_path, monkeypatch):
    device, places, run = torch.device("cuda", 0), [], exports._load_and_run
    monkeypatch.setattr(exports, "model_device", lambda _: device)
    monkeypatch.setattr(exports, "_outputs", lambda *_: {"output": torch.zeros(4, 3)})
    monkeypatch.setattr(convnet, "to", places.append)

    def load_and_run(artefact, scratch, library, there, attention, timeout):
        places.append(f"verified on {there}")
        return run(artefact, scratch, library, torch.device("cpu"), attention, timeout)

    monkeypatch.setattr(exports, "_load_and_run", load_and_run)
    with pytest.raises(FlexrankError, match="returns"):
        export(convnet, tmp_path / "small", tiny.batch_for("convnet"), factory="tiny:convnet")
    assert places == ["cpu", "verified on cuda:0", device]


def test_outputs_that_are_not_finite_are_not_exported(convnet, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "_load_and_run", lambda *arguments: pytest.fail("came too far"))
    convnet[1].weight.data.fill_(float("nan"))
    with pytest.raises(FlexrankError, match="not finite"):
        export(convnet, tmp_path / "small", tiny.batch_for("convnet"), factory="tiny:convnet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["precision", "autocast", "device"])
def test_what_a_caller_has_set_does_not_touch_an_export(setting, tmp_path):
    """The slack, and so the size, is the same, and so are the outputs that a fresh process is compared with."""
    model, batch = tiny.elastic("llama_tied"), tiny.token_batch()
    wanted = deploy(model, tiny.chain_of(model).at(0.5)).state_dict()
    before = torch.get_float32_matmul_precision()
    scope = torch.autocast("cpu", torch.bfloat16) if setting == "autocast" else contextlib.nullcontext()
    try:
        torch.set_float32_matmul_precision("medium" if setting == "precision" else before)
        torch.set_default_device("meta" if setting == "device" else None)
        with scope:
            small = deploy(model, tiny.chain_of(model).at(0.5))
            if setting == "precision":  # a fresh process does not have it
                export(small, tmp_path / "small", batch)
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_default_device(None)
    assert small.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in small.state_dict().items())


def test_padding_on_the_left_of_eager_attention_is_exported(tmp_path, verified_here):
    """Rows that see nothing but padding have other outputs with transformers' default attention."""
    model, batch = tiny.elastic("llama_tied"), tiny.token_batch()
    small = deploy(model, tiny.chain_of(model).at(0.5))
    batch["attention_mask"][:, :3] = 0
    default = small(**batch).logits
    small.set_attn_implementation("eager")
    assert tiny.relative(small(**batch).logits, default) > 1e-3
    export(small, tmp_path / "small", batch)


def test_all_tensors_of_a_head_for_questions_are_compared(tmp_path, verified_here, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": tiny.VOCABULARY}
    model = tiny.nest(BertForQuestionAnswering(BertConfig(**sizes, num_attention_heads=2)).eval())
    small = deploy(model, tiny.chain_of(model).at(0.5))
    export(small, tmp_path / "small", tiny.token_batch())
    answers = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "small")(**tiny.token_batch())
    assert tiny.relative(answers.end_logits, small(**tiny.token_batch()).end_logits) < 1e-6
    run = exports._load_and_run

    def other_ends(artefact, scratch, *others):
        report = run(artefact, scratch, *others)
        found = load_file(scratch / "outputs.safetensors")
        save_file(found | {"end_logits": found["end_logits"] + 0.1}, scratch / "outputs.safetensors")
        return report

    monkeypatch.setattr(exports, "_load_and_run", other_ends)
    with pytest.raises(FlexrankError, match="outputs differ by"):
        export(small, tmp_path / "small", tiny.token_batch())


class Own(LlamaForCausalLM):
    """A class that transformers does not have."""

    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = 2 * output.logits
        return output


def own():
    torch.manual_seed(0)
    return Own(tiny.llama_tied().config).eval()


def test_a_class_of_ones_own_comes_from_its_factory(tmp_path, verified_here):
    model, batch = tiny.nest(own()), tiny.token_batch()
    chain = tiny.chain_of(model)
    with pytest.raises(FlexrankError, match="Own is no class of transformers, which cannot build it; give factory="):
        save_elastic(model, chain, tmp_path / "elastic")
    assert not (tmp_path / "elastic").exists()
    save_elastic(model, chain, tmp_path / "elastic", factory=own)
    assert torch.equal(load_elastic(tmp_path / "elastic")[0](**batch).logits, model(**batch).logits)
    small = deploy(model, chain.at(0.5))
    with pytest.raises(FlexrankError, match="export of a Own needs factory="):
        export(small, tmp_path / "small", batch)
    export(small, tmp_path / "small", batch, factory=own)
    assert torch.equal(load_deployed(tmp_path / "small")(**batch).logits, small(**batch).logits)


def test_a_module_of_torch_is_refused_before_it_is_built(tmp_path):
    model = tiny.elastic("perceptron")
    save_elastic(model, tiny.chain_of(model), tmp_path / "elastic")  # names no factory
    with pytest.raises(FlexrankError, match="elastic: holds a Sequential of torch, not a transformers model; read it"):
        cut(tmp_path / "elastic", tmp_path / "small", budget=0.6)


@pytest.mark.parametrize("kind", ["texts and images", "encoder-decoder classifier"])
def test_models_that_need_other_inputs_are_cut(kind, tmp_path, verified_here):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "texts and images":
        texts, images = sizes | {"vocab_size": 40}, sizes | {"image_size": 16, "patch_size": 8}
        model = CLIPModel(CLIPConfig(text_config=texts, vision_config=images, projection_dim=16))
    else:
        model = BartForSequenceClassification(tiny.bart().config)
    model = tiny.nest(model.eval())
    save_elastic(model, tiny.chain_of(model), tmp_path / "elastic")
    cut(tmp_path / "elastic", tmp_path / "small", budget=0.6)
    assert inspect_artefact(tmp_path / "small")["kind"] == "deployed"


def test_a_slow_fresh_process_is_ended(convnet, tmp_path):
    with pytest.raises(FlexrankError, match=r"within 0\.01 s"):
        export(convnet, tmp_path / "small", tiny.batch_for("convnet"), factory="tiny:convnet", timeout=0.01)
    assert list(tmp_path.iterdir()) == []


def test_factors_that_are_not_finite_are_named():
    """Not as rows that need more slack, of which there is no more than the rank."""
    model = tiny.elastic("perceptron")
    name, layer = next(iter(nested_layers(model).items()))
    layer.u.data[0, 0] = float("nan")
    for slack in ("auto", 0, 10_000):
        with pytest.raises(FlexrankError, match=f"layer '{name}': the factors are not finite; check the weights"):
            deploy(model, tiny.chain_of(model).entries[0].profile, slack=slack)


@pytest.mark.parametrize("pad", [None, 0])
def test_a_classifier_that_knows_no_padding_is_cut_and_checked_on_one_text(pad, tmp_path, verified_here):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 40}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_labels=3, pad_token_id=pad)
    model = tiny.nest(LlamaForSequenceClassification(config).eval())
    save_elastic(model, tiny.chain_of(model), tmp_path / "elastic")
    cut(tmp_path / "elastic", tmp_path / "small", budget=0.6)
    assert inspect_artefact(tmp_path / "small")["kind"] == "deployed"
    assert len(runtimes.sample_inputs(model, 2, 8)["input_ids"]) == (1 if pad is None else 2)
    export_to(tmp_path / "small", "dense", tmp_path / "dense")
    with pytest.raises(FlexrankError, match="an export to dense; export the deployed size it was made from"):
        export_to(tmp_path / "dense", "torch", tmp_path / "out")


def test_an_export_takes_any_card_and_any_distribution_of_its_runtime(tmp_path, monkeypatch):
    """onnxruntime-gpu, for one, provides onnxruntime."""
    tiny.deployed("llama_tied").save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "README.md").write_bytes("# caf\xe9\n\n## Sizes\n\nMade in Z\xfcrich.\n".encode("latin1"))
    owners = metadata.packages_distributions()
    monkeypatch.setattr(metadata, "packages_distributions", lambda: owners | {"transformers": ["torch"]})
    facts = export_to(tmp_path / "small", "dense", tmp_path / "dense")
    assert facts["versions"]["transformers"] == metadata.version("torch") != metadata.version("transformers")
    assert "Made in Z" in (tmp_path / "dense" / "README.md").read_text(encoding="utf8")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads the old name
def test_what_is_not_a_whole_model_is_refused_before_a_process_starts(tmp_path):
    peft = pytest.importorskip("peft")
    small, batch = tiny.deployed("llama_untied"), tiny.batch_for("llama_untied")
    adapted = peft.get_peft_model(small, peft.LoraConfig(r=2, target_modules=["q_proj.latent"]))
    for model in (adapted, small):
        with pytest.raises(
            FlexrankError, match="q_proj.latent' has an adapter; first merge it into the weight: merge_a"
        ):
            export(model, tmp_path / "small", batch)
        with pytest.raises(FlexrankError, match="has an adapter; first merge it"):
            save_deployed(model, tmp_path / "small")
    model = tiny.elastic("llama_untied")
    chain = tiny.chain_of(model)
    model.model.layers[0].to("meta")
    wrong = "parameter 'model.layers.0.* is not in memory; load the model without device_map or offloading"
    with pytest.raises(FlexrankError, match=wrong):
        deploy(model, chain.at(0.5))
    with pytest.raises(FlexrankError, match=wrong):
        save_elastic(model, chain, tmp_path / "elastic")
    whole = tiny.deployed("llama_untied")
    whole.model.layers[0].to("meta")
    with pytest.raises(FlexrankError, match=wrong):
        export(whole, tmp_path / "small", batch)
    assert not any(tmp_path.iterdir())
