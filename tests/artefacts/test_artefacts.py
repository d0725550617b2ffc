"""Artefacts: the same bits back, a prefix without the rest, and one clear line for every kind of damage."""

import dataclasses
import errno
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

import tiny
from flexrank import files
from flexrank.artefacts.deployed import load_deployed, save_deployed
from flexrank.artefacts.elastic import ElasticWriter, load_components, load_elastic, save_elastic
from flexrank.artefacts.inspect import inspect_artefact
from flexrank.deployment import deploy, deployed_parameters_of
from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.hf.quantizer import DeployedConfig
from flexrank.nn.switch import full_profile, nested_layers, use_profile
from flexrank.profiles import RankProfile
from flexrank.run.tables import print_artefact
from tiny import agree, deployed, flip_a_bit, outputs, same_state

NAMES = ["bert", "llama_tied", "gpt2", "qwen3", "dinov3", *tiny.PLAIN]


def factory_of(name):
    return f"tiny:{name}" if name in tiny.PLAIN else None


def saved_elastic(name, directory):
    """A saved elastic network: (directory, model, chain)."""
    model = tiny.with_sizes(tiny.elastic(name))
    chain = tiny.chain_of(model)
    with use_profile(model, chain.entries[0].profile):  # the active ranks do not matter
        save_elastic(model, chain, directory, factory=factory_of(name))
    return directory, model, chain


@pytest.fixture
def saved(tmp_path):
    return saved_elastic("perceptron", tmp_path / "elastic")


@pytest.mark.parametrize("name", NAMES)
def test_an_elastic_model_comes_back_to_the_same_bits(name, tmp_path):
    directory, model, chain = saved_elastic(name, tmp_path / "elastic")
    again, same_chain = load_elastic(directory)
    batch = tiny.batch_for(name)
    assert same_state(again, model) and same_chain == chain and not again.training
    for entry in chain.entries:
        with use_profile(model, entry.profile), use_profile(again, entry.profile):
            assert agree(outputs(again, batch), outputs(model, batch))


@pytest.mark.parametrize("name", ["llama_tied", "tied_blocks"])
def test_ties_survive(name, tmp_path):
    directory, *_ = saved_elastic(name, tmp_path / "elastic")
    for again in (load_elastic(directory)[0], load_elastic(directory, 0.6)[0]):
        if name == "llama_tied":
            assert again.lm_head.weight is again.model.embed_tokens.weight
        else:
            assert again.again is again.shared


def test_a_budget_reads_no_byte_beyond_its_prefix(saved):
    directory, model, chain = saved
    entry = chain.entry_at(0.6)
    path = directory / "elastic.safetensors"
    tensors = load_file(path)
    for name, rank in entry.profile.items():
        for factor in "uv":
            tensors[f"{name}.{factor}"][rank:] = float("nan")
    save_file(tensors, path)
    small, shorter = load_elastic(directory, 0.6)
    batch = tiny.batch_for("perceptron")
    with use_profile(model, entry.profile):
        assert agree(outputs(small, batch), outputs(model, batch))
    assert full_profile(small) == entry.profile
    assert shorter.entries == chain.entries[: chain.entries.index(entry) + 1]
    assert same_state(deploy(small, entry.profile), deploy(model, entry.profile))
    with pytest.raises(FlexrankError, match=r"elastic.safetensors: tensor '\d.[uv]' does not match its checksum"):
        load_elastic(directory)


def test_a_matrix_of_full_rank_is_read_only_where_the_layer_is_full(tmp_path):
    """And no component is written that only full rank would have."""
    model = tiny.with_sizes(tiny.elastic("perceptron"), dense=True)
    chain, batch = tiny.chain_of(model), tiny.batch_for("perceptron")
    save_elastic(model, chain, tmp_path / "elastic", factory=tiny.perceptron)
    path = tmp_path / "elastic" / "elastic.safetensors"
    tensors = load_file(path)
    for name, rank in chain.entries[-2].profile.items():
        assert len(tensors[f"{name}.u"]) == len(tensors[f"{name}.v"]) == rank
    kept, artefact = sum(value.numel() for value in tensors.values()), inspect_artefact(tmp_path / "elastic")
    assert artefact["parameters"] == kept
    with (console := Console(width=120)).capture() as printed:
        print_artefact(tmp_path, artefact, console)
    assert "24 x 12    8, full" in printed.get()
    for budget in chain.budgets:
        again, shorter = load_elastic(tmp_path / "elastic", budget)
        assert {name: layer.rank for name, layer in nested_layers(again).items()} == shorter.entries[-1].profile
        for entry in shorter.entries:
            with use_profile(model, entry.profile), use_profile(again, entry.profile):
                assert agree(outputs(again, batch), outputs(model, batch))
    between = dataclasses.replace(chain.entries[-2], profile=RankProfile({"0": 11, "2": 10, "4": 4}))
    gap = dataclasses.replace(chain, entries=(*chain.entries[:-1], between, chain.entries[-1]))
    with pytest.raises(FlexrankError, match="layer '0': rank 11 is out of range; it has 1 to 8, and 12"):
        save_elastic(load_elastic(tmp_path / "elastic")[0], gap, tmp_path / "other", factory=tiny.perceptron)
    assert not (tmp_path / "other").exists()
    tensors["0.dense"][:] = 0
    save_file(tensors, path)
    load_elastic(tmp_path / "elastic", chain.budgets[-2])
    with pytest.raises(FlexrankError, match="tensor '0.dense' does not match its checksum"):
        load_elastic(tmp_path / "elastic")


def test_components_between_two_checksums_are_checked(tmp_path: Path) -> None:
    model = tiny.elastic("llama_tied")
    chain = tiny.chain_of(model, (1.0,))
    name, layer = next(iter(nested_layers(model).items()))
    writer = ElasticWriter(model, tmp_path)
    ranks, u = dict.fromkeys(full_profile(model), 3), layer.u.detach().clone()
    for one in nested_layers(model):
        writer.put(one)
    writer.finish(chain)
    short = load_components(tmp_path, ranks).get_submodule(name)
    assert torch.equal(short.u, u[:3]) and short.u.untyped_storage().nbytes() == 3 * u.shape[1] * 4
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    tensors[f"{name}.u"][-1] = 0  # above what is read
    save_file(tensors, path)
    with pytest.raises(FlexrankError, match="does not match its checksum"):
        load_components(tmp_path, ranks)


def test_other_limits_choose_the_prefix_too(saved):
    directory, _, chain = saved
    for entry in chain.entries:
        small, shorter = load_elastic(directory, max_params=chain.model_parameters(entry))
        assert shorter.entries[-1] == entry and full_profile(small) == entry.profile
        assert load_elastic(directory, max_bytes=chain.model_bytes(entry))[1] == shorter


def test_an_artefact_ends_at_the_largest_size_that_was_trained(tmp_path):
    """Above it the base model is the better one."""
    model = tiny.with_sizes(tiny.elastic("perceptron"), budgets=(0.25, 0.5))
    chain = tiny.chain_of(model)
    save_elastic(model, chain, tmp_path / "elastic")
    again, shorter = load_elastic(tmp_path / "elastic", model=tiny.perceptron())
    assert shorter.entries == chain.entries[:2] and full_profile(again) == chain.entries[1].profile
    for name, layer in nested_layers(again).items():
        assert torch.equal(layer.u, model.get_submodule(name).u[: chain.entries[1].profile[name]])
    save_elastic(again, shorter, tmp_path / "copy")
    assert same_state(load_elastic(tmp_path / "copy", model=tiny.perceptron())[0], again)
    with pytest.raises(FlexrankError, match="a chain needs at least one profile"):
        save_elastic(model, tiny.chain_of(model, (0.8, 1.0)), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_given_architecture_is_filled_in_place(saved):
    directory, model, _ = saved
    bare = tiny.perceptron()
    again, _ = load_elastic(directory, model=bare)
    assert again is bare and same_state(again, model)


def edit(path, **changes):
    document = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (document | changes).items() if value is not None}))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5])


def drop_tensor(path):
    tensors = load_file(path)
    del tensors["0.u"]
    save_file(tensors, path)


def recast(path):
    """The same bytes by another name."""
    tensors = load_file(path)
    save_file(tensors | {"0.u": tensors["0.u"].view(torch.int32)}, path)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("elastic.json", lambda path: path.unlink(), "holds no elastic model"),
        ("elastic.json", truncate, "not JSON"),
        (
            "elastic.json",
            lambda path: edit(path, format=7),
            "has format 7; this version of flexrank reads formats up to 3",
        ),
        ("elastic.json", lambda path: edit(path, chain=None), "key 'chain' is missing"),
        ("elastic.json", lambda path: edit(path, parameters=5), "does not match its checksum"),
        ("elastic.json", lambda path: edit(path, kind="deployed"), "kind 'elastic'"),
        ("elastic.safetensors", lambda path: path.unlink(), "no such file"),
        ("elastic.safetensors", truncate, "truncated, or not a safetensors file"),
        ("elastic.safetensors", flip_a_bit, "does not match its checksum"),
        ("elastic.safetensors", drop_tensor, "tensor '0.u' is missing"),
        ("elastic.safetensors", recast, "tensor '0.u' is not torch.float32"),
        ("model.safetensors", truncate, "does not match its checksum"),
        ("model.safetensors", flip_a_bit, "does not match its checksum"),
        ("model.safetensors", lambda path: path.unlink(), "incomplete"),
        ("flexrank.json", lambda path: edit(path, layers={}), "does not match its checksum"),
        ("flexrank.json", lambda path: path.unlink(), "no such file"),
    ],
)
def test_damage_to_an_artefact_is_one_line(file, damage, message, tmp_path):
    if "elastic" in file:
        saved_elastic("perceptron", tmp_path / "artefact")
    else:
        save_deployed(deployed("perceptron"), tmp_path / "artefact", factory=tiny.perceptron)
    damage(tmp_path / "artefact" / file)
    with pytest.raises(FlexrankError, match=message) as caught:
        (load_elastic if "elastic" in file else load_deployed)(tmp_path / "artefact")
    assert "\n" not in str(caught.value)


def test_an_edited_config_is_noticed(tmp_path):
    saved_elastic("bert", tmp_path / "elastic")
    edit(tmp_path / "elastic" / "config.json", layer_norm_eps=1.0)
    with pytest.raises(FlexrankError, match="config.json: does not match its checksum"):
        load_elastic(tmp_path / "elastic")


def test_wrong_use_is_one_line(saved, tmp_path):
    directory, model, chain = saved
    for limits, message in (({"budget": 0.01}, "budget=0.01 is too small"), ({"budget": 1.5}, "budget 1.5")):
        with pytest.raises(FlexrankError, match=message):
            load_elastic(directory, **limits)
    with pytest.raises(FlexrankError, match="has no layer '4'"):
        load_elastic(directory, model=nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16)))
    wider = nn.Sequential(*tiny.perceptron(), nn.LayerNorm(6))
    with pytest.raises(FlexrankError, match="tensor '5.(weight|bias)' of Sequential is missing"):
        load_elastic(directory, model=wider)
    with pytest.raises(FlexrankError, match="no such directory"):
        inspect_artefact(tmp_path / "nowhere")
    other = tiny.chain_of(tiny.elastic("convnet"))
    with pytest.raises(FlexrankError, match="profile and model must name the same layers"):
        save_elastic(model, other, tmp_path / "other")
    save_elastic(model, chain, tmp_path / "unnamed")
    with pytest.raises(FlexrankError, match="names no factory"):
        load_elastic(tmp_path / "unnamed")
    assert not (tmp_path / "other").exists()


def test_a_full_disk_leaves_the_old_artefact(saved, monkeypatch):
    directory, model, chain = saved
    before = (directory / "elastic.json").read_bytes()

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_document", full)
    with pytest.raises(OSError, match="No space"):
        save_elastic(model, chain, directory)
    assert (directory / "elastic.json").read_bytes() == before and len(list(directory.parent.iterdir())) == 1


@pytest.mark.parametrize("name", ["bert", "convnet"])
def test_inspect_tells_what_an_artefact_holds(name, tmp_path):
    directory, model, chain = saved_elastic(name, tmp_path / "elastic")
    summary = inspect_artefact(tmp_path / "elastic")
    assert summary["kind"] == "elastic" and summary["class"] == type(model).__name__ and summary["dtype"] == "F32"
    assert summary["bytes_on_disk"] == sum(file.stat().st_size for file in (tmp_path / "elastic").iterdir())
    assert summary["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert {key: spec["rank"] for key, spec in summary["layers"].items()} == chain.entries[-1].profile
    small = deploy(model, chain.entries[1].profile, slack=0)
    row = summary["budgets"][1]
    assert row["params_layers"] == deployed_parameters_of(small, chain.entries[1].profile)
    assert row["params_model"] == sum(parameter.numel() for parameter in small.parameters())

    if name == "bert":
        models.save_model(small, tmp_path / "small")
    else:
        save_deployed(small, tmp_path / "small")
    summary = inspect_artefact(tmp_path / "small")
    assert summary["kind"] == "deployed" and summary["class"] == type(model).__name__ and "budgets" not in summary
    ranks = {key: spec["rank"] for key, spec in summary["layers"].items()}
    assert ranks.items() <= chain.entries[1].profile.items() and ranks
    assert summary["parameters"] == row["params_model"]  # without the statistics of norms


def test_inspect_refuses_other_directories(tmp_path):
    for content in ("{}", '{"model_type": "bert"}', "[1]", '{"quantization_config": ["flexrank"]}'):
        with pytest.raises(FlexrankError, match="not an artefact of flexrank"):
            inspect_artefact(tmp_path)
        (tmp_path / "config.json").write_text(content)


@pytest.mark.parametrize(
    "layers", [None, [], {"a": None}, {"a": {"form": "dense"}}, {"a": {"form": 1, "shape": 3, "rank": 1, "bias": 0}}]
)
def test_an_edited_configuration_is_one_line(layers, tmp_path):
    config = {"quantization_config": {"quant_method": "flexrank", "layers": layers}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlexrankError, match="in its quantization_config is not a flexrank layer; save it again"):
        inspect_artefact(tmp_path)
    with pytest.raises(FlexrankError, match="in its quantization_config is not a flexrank layer; save it again"):
        DeployedConfig(layers)


def test_a_large_artefact_is_several_files(tmp_path, monkeypatch):
    """Its sizes are those of the same artefact in one file, and damage in any file is found."""
    directory, model, chain = saved_elastic("llama_tied", tmp_path / "one")
    save_elastic(model, chain, tmp_path / "many", shard_bytes=20_000)
    names = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    count = len(names)
    assert count > 3 and names == [f"elastic-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for name in names[:-1]:
        sizes = [one.nbytes for one in load_file(tmp_path / "many" / name).values()]
        assert sum(sizes) - max(sizes) < 20_000 <= sum(sizes)
    for budget in (None, 0.6):
        assert same_state(load_elastic(directory, budget)[0], load_elastic(tmp_path / "many", budget)[0])
    one, many = (inspect_artefact(place) for place in (directory, tmp_path / "many"))
    assert one.pop("bytes_on_disk") < many.pop("bytes_on_disk") and one == many
    flip_a_bit(tmp_path / "many" / names[1])
    with pytest.raises(FlexrankError, match=rf"{names[1]}: tensor .* does not match its checksum"):
        load_elastic(tmp_path / "many")
    save_elastic(model, chain, tmp_path / "many", shard_bytes=20_000)
    (tmp_path / "many" / names[2]).unlink()
    with pytest.raises(FlexrankError, match=f"{names[2]}: no such file"):
        load_elastic(tmp_path / "many")


def test_a_smaller_artefact_leaves_no_file_of_a_larger_one(tmp_path):
    _, model, chain = saved_elastic("perceptron", tmp_path / "one")
    save_elastic(model, chain, tmp_path / "two", factory=tiny.perceptron, shard_bytes=500)
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 1
    save_elastic(model, chain, tmp_path / "two", factory=tiny.perceptron)
    assert [path.name for path in (tmp_path / "two").glob("*.safetensors")] == ["elastic.safetensors"]


def test_an_artefact_of_a_version_without_shards_is_read(saved):
    directory, model, _ = saved
    document = files.read_document(directory / "elastic.json", "elastic", ())
    assert document.pop("shards") == {"elastic.safetensors": list(document["tensors"])}
    files.write_document(directory / "elastic.json", "elastic", document)
    assert same_state(load_elastic(directory)[0], model)
