"""Damage to any file that flexrank reads back: one clear line, or what the undamaged files give; nothing else."""

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tiny
from flexrank.artefacts.deployed import load_deployed, save_deployed
from flexrank.artefacts.elastic import load_elastic, save_elastic
from flexrank.deployment import export
from flexrank.distill import distill_
from flexrank.errors import FlexrankError
from flexrank.files import digest_json, digest_tensor
from flexrank.hf import models
from flexrank.nn.sharding import shard_
from flexrank.probe import probe_sensitivity

#: Of each file; FLEXRANK_MUTATIONS=200 is the whole of it, which takes minutes.
MUTATIONS = int(os.environ.get("FLEXRANK_MUTATIONS", "10"))
STEPS = 3


def content(state: dict[str, Tensor], *more: Any) -> str:
    """A digest of what was read."""
    tensors = {name: [str(one.dtype), list(one.shape), digest_tensor(one)] for name, one in state.items()}
    return digest_json([tensors, *more])


def elastic(directory: Path, budget: float | None = None) -> str:
    model, chain = load_elastic(directory, budget)
    return content(model.state_dict(), chain.to_json())


def prefix(directory: Path) -> str:
    return elastic(directory, 0.5)


def deployed(directory: Path) -> str:
    return content(load_deployed(directory).state_dict())


def exported(directory: Path) -> str:
    model = models.load_model(directory, "language")
    config = json.loads(model.config.to_json_string(use_diff=False))
    return content(model.state_dict(), {key: value for key, value in config.items() if key != "_name_or_path"})


def consolidated(directory: Path) -> str:
    """What distillation goes on from; at the end of it, that is its result."""
    model, teacher = tiny.nest(tiny.build("perceptron")), tiny.build("perceptron")
    batches = [torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    chain = tiny.chain_of(model, (0.5, 0.8))
    shard_(model)  # of several processes
    history = distill_(model, teacher, batches, chain, steps=STEPS, checkpoint=directory, checkpoint_every=1)
    return content(model.state_dict(), history.losses, history.profiles)


def probed(directory: Path) -> str:
    def evaluate(model: nn.Module) -> float:
        return float(tiny.outputs(model, tiny.batch_for("perceptron")).square().sum())

    table = probe_sensitivity(tiny.elastic("perceptron"), evaluate, 4, checkpoint=directory / "probe.json")
    return digest_json(table.to_json())


def save_elastic_llama(directory: Path) -> None:
    model = tiny.with_sizes(tiny.elastic("llama_tied"))
    save_elastic(model, tiny.chain_of(model), directory, shard_bytes=70_000)


def save_deployed_convnet(directory: Path) -> None:
    save_deployed(tiny.deployed("convnet"), directory, factory=tiny.convnet)


def save_export(directory: Path) -> None:
    export(tiny.deployed("llama_tied"), directory, tiny.batch_for("llama_tied"))


def save_parts(directory: Path) -> None:
    from launched import ended, started  # which those processes, who import this module, cannot

    with started(2, "tests/sharded_checkpoint.py", directory) as run:
        _, words = ended(run)
    assert words == []


#: By name, who writes the files and who reads them.
KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], str]]] = {
    "elastic": (save_elastic_llama, elastic),
    "prefix": (save_elastic_llama, prefix),
    "deployed": (save_deployed_convnet, deployed),
    "export": (save_export, exported),
    "consolidation": (consolidated, consolidated),
    "parts": (save_parts, consolidated),
    "probe": (lambda directory: (directory.mkdir(), probed(directory)), probed),
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """Files of one kind, and a second copy of them to be damaged."""

    place: Path
    read: Callable[[Path], str]
    whole: str

    @property
    def copy(self) -> Path:
        return self.place.with_name("copy")

    def check(self) -> bool:
        """Whether the copy, as it is, is refused by one line; else it must give what the whole files do."""
        try:
            found = self.read(self.copy)
        except FlexrankError as error:
            assert "\n" not in str(error) and str(error)
            return True
        assert found == self.whole
        return False

    def restore(self) -> None:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.place, self.copy)


@pytest.fixture(scope="module", params=list(KINDS))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    from flexrank.deployment import exports
    from tiny_runs import here

    place = tmp_path_factory.mktemp("damage") / "whole"
    write, read = KINDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exports, "in_fresh_process", here)
        write(place)
    one = Subject(place, read, read(place))
    one.restore()
    assert not one.check()
    yield one


def stretch(chance: random.Random, size: int) -> slice:
    start = chance.randrange(size)
    return slice(start, start + chance.randint(1, 64))


def flip_bits(chance: random.Random, octets: bytearray) -> None:
    for _ in range(chance.randint(1, 3)):
        octets[chance.randrange(len(octets))] ^= 1 << chance.randrange(8)


def change_bytes(chance: random.Random, octets: bytearray) -> None:
    place = stretch(chance, len(octets))
    octets[place] = chance.randbytes(len(octets[place]))


def zero(chance: random.Random, octets: bytearray) -> None:
    place = stretch(chance, len(octets))
    octets[place] = bytes(len(octets[place]))


def truncate(chance: random.Random, octets: bytearray) -> None:
    del octets[chance.randrange(len(octets)) :]


def cut_out(chance: random.Random, octets: bytearray) -> None:
    del octets[stretch(chance, len(octets))]


def add(chance: random.Random, octets: bytearray) -> None:
    place = chance.randrange(len(octets))
    octets[place:place] = chance.randbytes(chance.randint(1, 9))


def change_digit(chance: random.Random, octets: bytearray) -> None:
    """In a text another number, as a rule still a valid one; in the head of tensors another place or size."""
    digits = [place for place, octet in enumerate(octets[:20_000]) if chr(octet).isdigit()]
    octets[chance.choice(digits or [0])] = ord(chance.choice("0123456789e-."))


BYTES = (flip_bits, change_bytes, zero, truncate, cut_out, add, change_digit)


def swap(chance: random.Random, path: Path) -> None:
    """Two files of the directory in each other's place; alone, a file is replaced by its own first half."""
    others = sorted(other for other in path.parent.iterdir() if other != path)
    whole = path.read_bytes()
    if others:
        other = chance.choice(others)
        path.write_bytes(other.read_bytes())
        other.write_bytes(whole)
    else:
        path.write_bytes(whole[: len(whole) // 2])


def change_tensors(chance: random.Random, path: Path) -> None:
    """A tensor is missing, called otherwise, another's, of another dtype or of another shape; a valid file."""
    tensors = load_file(path)
    name, other = chance.choice(sorted(tensors)), chance.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kinds: list[dict[str, Tensor]] = [{}, {f"{name}x": tensor}, {name: tensors.get(other, tensor + 1).clone()}]
    kinds += [{name: tensor.view(torch.int32) if tensor.element_size() == 4 else tensor.to(torch.float64)}]
    kinds += [{name: tensor.reshape(-1, 1)}]
    save_file(tensors | chance.choice(kinds), path, {"format": "pt"})


def mutate(chance: random.Random, path: Path) -> str:
    """Damages a file, perhaps another one with it; which way."""
    ways: list[Any] = [*BYTES, swap]
    if path.suffix == ".safetensors":
        ways.append(change_tensors)
    way = chance.choice(ways)
    if way in BYTES:
        way(chance, octets := bytearray(path.read_bytes()))
        path.write_bytes(octets)
    else:
        way(chance, path)
    return way.__name__


def test_every_file_survives_or_is_refused(subject: Subject) -> None:
    names = sorted(path.relative_to(subject.place) for path in subject.place.rglob("*") if path.is_file())
    for name in names:
        refused = 0
        for seed in range(MUTATIONS):
            chance = random.Random(f"{name} {seed}")
            way = mutate(chance, subject.copy / name)
            try:
                refused += subject.check()
            except Exception as error:
                raise AssertionError(f"{name}, {way}, seed {seed}") from error
            subject.restore()
        least = 0.3 if subject.read is prefix else 0.8
        assert name.name == "README.md" or refused >= least * MUTATIONS, name  # the card is the user's to edit


#: The same examples each time, however long one takes.
OPTIONS: dict[str, Any] = {
    "derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)
}  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a JSON value with each of its keys or indices."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places(inner)


def test_every_json_survives_or_is_refused(subject: Subject) -> None:
    names = sorted(path.name for path in subject.place.glob("*.json"))

    @settings(max_examples=MUTATIONS * len(names), **OPTIONS)
    @given(
        st.sampled_from(names), st.integers(0, 2**31), VALUES, st.sampled_from(["change", "delete", "rename", "all"])
    )
    def damaged(name: str, number: int, value: Any, way: str) -> None:
        document = json.loads((subject.place / name).read_text())
        every = list(places(document))
        inside, key = every[number % len(every)] if number % 3 else every[number % len(document)]
        if way == "all":
            document = value
        elif way == "change" or isinstance(inside, list):
            inside[key] = value
        else:
            kept = inside.pop(key)
            inside |= {f"{key}x": kept} if way == "rename" else {}
        (subject.copy / name).write_text(json.dumps(document))
        subject.check()
        shutil.copy(subject.place / name, subject.copy / name)

    damaged()


def test_an_export_of_transformers_is_checked_by_its_own_loader_too(tmp_path: Path, verified_here: None) -> None:
    """The weights and the configuration, before any value is taken from them."""
    save_export(tmp_path / "export")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    config = json.loads((path := tmp_path / "export" / "config.json").read_text())
    path.write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(FlexrankError, match="config.json: does not match its checksum"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")


def test_a_damaged_checkpoint_says_how_to_go_on(tmp_path: Path) -> None:
    consolidated(tmp_path / "state")
    tiny.flip_a_bit(tmp_path / "state" / "state.safetensors")
    with pytest.raises(FlexrankError, match=r"checksum; truncated or edited; remove .*/state to begin again"):
        consolidated(tmp_path / "state")
