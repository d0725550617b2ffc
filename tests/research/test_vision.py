"""The networks of the study `vision` are what they claim to be, and the study measures what it says."""

import copy
import dataclasses
import io
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import tiny
from flexrank.data.batches import output_tensor
from flexrank.data.halves import half_of
from flexrank.data.images import Scaling
from flexrank.errors import FlexrankError
from flexrank.files import read_json
from flexrank.hf.models import load_model
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers, use_profile
from research.experiment import Request
from research.studies import cifar, vision
from research.studies.cifar import Recipe, train_vit
from research.studies.vision import BUDGETS, Images, Network, compress

SCALING = Scaling((0.5,) * 3, (0.25,) * 3)
TINY = Recipe(epochs=3, batch_size=8, hidden=16, layers=1, heads=2, feed_forward=24, patch=8)
PLAN = {"steps": 4, "batch_size": 8, "calibration": 16, "probe": 8, "levels": 8, "warmup_steps": 1, "test": 40}


def colours(count: int, size: int, seed: int) -> tuple[Any, Any]:
    """Noisy images (N, size, size, 3) of one of three colours, and which."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, count)
    images = random.integers(0, 120, (count, size, size, 3))
    images[np.arange(count), :, :, labels] += 80
    return images.astype(np.uint8), labels


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like that of CIFAR-10."""
    directory = tmp_path_factory.mktemp("images")
    for name, count in ((cifar.TRAIN, 40), (cifar.TEST, 30)):
        images, labels = colours(count, 16, count)
        encoded = []
        for image in images:
            with io.BytesIO() as buffer:
                Image.fromarray(image).save(buffer, "JPEG", quality=95)
                encoded.append(buffer.getvalue())
        offsets = np.cumsum([0, *map(len, encoded)])
        np.savez(directory / name, jpg=np.frombuffer(b"".join(encoded), np.uint8), offsets=offsets, y=labels)
    return directory


def test_training_writes_a_network_that_loads_and_is_as_good_as_it_says(files: Path, tmp_path: Path) -> None:
    record = train_vit(files, tmp_path / "vit", dataclasses.replace(TINY, epochs=8, learning_rate=1e-2))
    model = load_model(tmp_path / "vit", "classification")
    scaling = Scaling.read(tmp_path / "vit" / "preprocessor_config.json")
    pixels, labels = cifar.read_tensors(files / cifar.TEST)
    with torch.no_grad():
        classes = [int(model(scaling(one[None])).logits.argmax()) for one in pixels]
    right = sum(a == b for a, b in zip(classes, labels.tolist(), strict=True))
    assert record["accuracy"] == right / len(labels) > 0.5
    assert record == read_json(tmp_path / "vit" / cifar.RECORD)
    assert [path.name for path in tmp_path.iterdir()] == ["vit"]  # no checkpoint is left
    (tmp_path / "own.txt").write_text("mine")
    with pytest.raises(FlexrankError, match="holds other files"):  # it replaces only another training
        train_vit(files, tmp_path, dataclasses.replace(TINY, epochs=1))


def test_an_interrupted_training_goes_on_to_the_same_bits(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, save = train_vit(files, tmp_path / "whole", TINY), cifar.State.save

    def save_and_stop(state: cifar.State) -> None:
        save(state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cifar.State, "save", save_and_stop)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                train_vit(files, tmp_path / "cut", TINY)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(FlexrankError, match="was written with epochs=3, not 4"):
        train_vit(files, tmp_path / "cut", dataclasses.replace(TINY, epochs=4))
    assert train_vit(files, tmp_path / "cut", TINY) == wanted
    state = "model.safetensors"
    assert (tmp_path / "cut" / state).read_bytes() == (tmp_path / "whole" / state).read_bytes()


def test_the_study_says_how_its_transformer_was_trained(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = tmp_path / "assets"
    shutil.copytree(files, assets / "cifar10")
    (assets / vision.RESNET_FILE).parent.mkdir()
    save_file(cifar.ResNet20().state_dict(), assets / vision.RESNET_FILE)
    monkeypatch.setenv("FLEXRANK_ASSETS", str(assets))
    monkeypatch.setattr(vision, "compress", lambda *_: {"settings": {"seeds": 3}, "tables": []})
    record = train_vit(files, tmp_path / vision.VIT_DIRECTORY, dataclasses.replace(TINY, epochs=1))
    trained = dataclasses.asdict(TINY) | {"epochs": 1, "accuracy": record["accuracy"]}
    wanted = {"settings": {"seeds": 3, "training_of_the_transformer": trained}, "tables": []}
    assert vision.run(Request(tmp_path / "vision")) == wanted


def test_the_shortcut_is_option_a() -> None:
    block, x = cifar.ResidualBlock(4, 8, 2).eval(), torch.rand(2, 4, 6, 6)
    torch.nn.init.zeros_(block.bn2.weight)  # the convolutions add nothing
    result = block(x)
    assert result.shape == (2, 8, 3, 3) and not result[:, [0, 1, 6, 7]].any()
    for channel, row, column in itertools.product(range(4), range(3), range(3)):
        assert torch.equal(result[:, channel + 2, row, column], x[:, channel, 2 * row, 2 * column])


def test_resnet20_has_the_published_size() -> None:
    model = cifar.ResNet20()
    assert sum(p.numel() for p in model.parameters()) == 269_722  # He et al. 2016, table 6: .27 million
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) + 1 == 20


def test_resnet20_classifies_as_published(assets: Path) -> None:
    model = cifar.load_resnet20(assets / vision.RESNET_FILE)
    pixels, labels = cifar.read_tensors(assets / "cifar10" / cifar.TEST)
    images = Images(pixels[:1000], pixels[:1000], labels[:1000])
    network = Network("r", "ResNet-20", model, cifar.RESNET_SCALING, 1e-3, "")
    # 87.31 % of all 10,000; three standard deviations of the share of 1,000 are 3.2 points.
    assert abs(network.accuracy(model, images) - 87.31) < 3.2


def networks() -> tuple[Network, ...]:
    torch.manual_seed(0)
    transformer = tiny.vit()
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return (
        Network("vit", "vision transformer", transformer, SCALING, 1e-3, "a"),
        Network("conv", "convolutions", tiny.build("convnet"), SCALING, 1e-3, "b"),
    )


def tiny_images() -> Images:
    training, _ = colours(80, 16, 0)
    test, classes = colours(60, 16, 1)
    first, second = (torch.from_numpy(values).permute(0, 3, 1, 2).contiguous() for values in (training, test))
    return Images(first, second, torch.from_numpy(classes))


def share_right(model: Any, images: Images, count: int) -> float:
    """Percent right among the first test images, one by one."""
    right = 0
    for image, label in zip(images.test[:count], images.classes[:count], strict=True):
        output = model((image[None].float() / 255 - 0.5) / 0.25)
        right += int(getattr(output, "logits", output).argmax() == label)
    return 100 * right / count


@torch.no_grad()
def test_the_whole_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, nets, small = tiny_images(), networks(), BUDGETS.index(0.3)
    with torch.enable_grad():
        result = compress(nets, images, PLAN, Request(tmp_path, seeds=2))
    kept = [place for place, image in enumerate(images.test) if half_of(image) == "reporting"]
    reported = Images(images.training, images.test[kept], images.classes[kept])
    assert 0 < len(kept) < 40 and result["data"]["images"] == len(kept)
    for network, own in zip(nets, result["data"]["networks"], strict=True):
        assert own["full"] == pytest.approx(share_right(network.model, reported, len(kept)))
        assert len(own["svd"]) == len(own["datasvd"]) == len(own["fisher"]) == len(own["ours"]) == 2
        (alone,) = own["alone"]
        assert [at for at, one in zip(BUDGETS, alone, strict=True) if one is not None] == list(vision.SEPARATE_BUDGETS)
    assert not list(tmp_path.rglob("*, distilled"))
    # A finished unit is not computed again, and what is read back is what was written.
    monkeypatch.setattr(vision, "distill_", None)
    monkeypatch.setattr(vision, "collect_moments", None)
    assert compress(nets, images, PLAN, Request(tmp_path, seeds=2)) == result

    (quality,) = result["tables"]
    assert quality["columns"][:2] == ["network, stage", "full"] and len(quality["columns"]) == 2 + len(BUDGETS)
    (first, second, *losers), own = result["claims"], result["data"]["networks"][0]
    mean = sum(values[small] for values in own["ours"]) / 2
    row = next(
        row for row in quality["rows"] if row[0].endswith("transformer, weighted by gradients too, consolidated")
    )
    assert row[2 + small]["mean"] == pytest.approx(mean)
    lost = [own["full"] - values[small] for values in own["ours"]]
    assert first["holds"] == (max(lost) <= 5)
    assert first["here"].startswith(f"{own['full'] - mean:.1f} ({min(lost):.1f} to {max(lost):.1f})")
    alone = next(row for row in quality["rows"] if row[0] == f"vision transformer, {vision.STAGES['alone']}")
    assert alone[2] is None and alone[2 + small]["mean"] == own["alone"][0][small]
    early = [own["full"] - values[BUDGETS.index(0.7)] for values in own["datasvd"]]
    assert second["holds"] == (min(early) > 5) and second["here"].startswith(f"{sum(early) / 2:.1f} ({min(early):.1f}")
    assert [one["what"].split(",")[0] for one in losers] == ["vision transformer", "convolutions"]
    panels = vision.draw(result["data"]).axes
    assert [panel.get_title() for panel in panels] == ["vision transformer", "convolutions"]
    line = next(line for line in panels[0].get_lines() if line.get_label() == vision.STAGES["ours"])
    assert line.get_ydata()[small] == pytest.approx(mean)


def test_what_a_run_does_by_itself_is_weighted_by_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained is decomposed by moments with gradients, and has a chain of its own."""
    network, images, losses, trained, collect = networks()[0], tiny_images(), [], [], vision.collect_moments

    def spy(*args: Any, gradient_loss: Any) -> Any:
        losses.append(gradient_loss)
        return collect(*args, gradient_loss=gradient_loss)

    monkeypatch.setattr(vision, "collect_moments", spy)
    monkeypatch.setattr(vision, "distill_", lambda *args, checkpoint, **_: trained.append(args) or checkpoint.mkdir())
    trial = vision._Trial(network, images, PLAN, 0, vision.Ledger(tmp_path, {}))
    found = trial.by_gradients()
    assert losses == [vision.OBJECTIVE.fisher_loss] and found["fisher"] == found["ours"]  # training is a stand-in
    (model, _, _, chain) = trained[0]
    assert chain.to_json() == trial.searched(trial.decompose("fisher")[0], "fisher").to_json()
    first, second = (next(iter(nested_layers(one).values())).u for one in (model, trial.decomposed[0]))
    assert not torch.allclose(first, second)


@torch.no_grad()
def test_a_size_alone_is_trained_for_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained, and what is scored, is the decomposed network at that profile."""
    network, images, seen = networks()[1], tiny_images(), []
    monkeypatch.setattr(vision, "SEPARATE_BUDGETS", (0.3,))
    monkeypatch.setattr(vision, "distill_", lambda *args, checkpoint, **_: seen.append(args) or checkpoint.mkdir())
    trial = vision._Trial(network, images, PLAN, 0, vision.Ledger(tmp_path, {}))
    alone = trial.trained_separately()
    (place,) = [place for place, one in enumerate(alone) if one is not None]
    (model, teacher, _, profiles), profile = seen[0], trial.chain.at(0.3)
    assert teacher is network.model and profiles == [profile] and BUDGETS[place] == 0.3
    with use_profile(model, profile):
        assert alone[place] == pytest.approx(share_right(model, images, 60))


def truncated(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * values[:rank] @ vt[:rank]


@torch.no_grad()
def test_stages_of_a_trial(tmp_path: Path) -> None:
    """The parts of the training images do not meet; DataSVD is the decomposed network at the chain's profile."""
    images, network = tiny_images(), networks()[0]
    ledger = vision.Ledger(tmp_path, {})
    trial = vision._Trial(network, images, PLAN, 1, ledger)
    parts = [{image.numpy().tobytes() for image in part} for part in (trial.calibration, trial.probe, trial.rest)]
    assert [len(part) for part in parts] == [16, 8, 56] and len(set.union(*parts)) == 80
    assert not torch.equal(vision._Trial(network, images, PLAN, 2, ledger).calibration, trial.calibration)
    wanted = []
    for energies in trial.decomposed[1].values():
        values = energies.tolist()
        wanted.append(next(r for r in range(1, len(values) + 1) if sum(values[:r]) >= 0.99 * sum(values)) / len(values))
    assert trial.energetic_share() == pytest.approx(sum(wanted) / len(wanted))
    model, chain = trial.decomposed[0], trial.chain
    assert list(chain.budgets) == sorted(BUDGETS)
    before = trial.accuracies(model, chain)
    with use_profile(model, chain.at(0.3)):
        expected = share_right(model, images, 60)
    assert before[BUDGETS.index(0.3)] == pytest.approx(expected)
    plain = copy.deepcopy(network.model)
    for layer in select_layers(plain).values():
        m, n = layer.weight.shape[0], layer.weight[0].numel()
        layer.weight.copy_(truncated(layer.weight.reshape(m, n).double(), 3).reshape(layer.weight.shape))
    ours = trial.decompose("svd")[0]
    with use_profile(ours, {name: 3 for name in chain.at(0.3)}):
        batch = next(iter(network.batches(images.test)))
        assert tiny.relative(output_tensor(ours(batch)), output_tensor(plain(batch))) < 1e-4
    assert trial.plain_svd() != before
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.enable_grad():
        trained = trial.trained(chain)
    state = trained.state_dict()
    assert any(not torch.equal(value, state[name]) for name, value in kept.items())
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())  # for the next training
    assert model.config._attn_implementation == network.model.config._attn_implementation == "sdpa"


def test_sizes_that_lose_by_consolidation_are_named() -> None:
    """Two seeds at eight budgets: .8 falls by 1 and rises by .5, .7 rises by 1 and falls by 1, the rest stay."""
    before, first, second = ([50.0] * len(BUDGETS) for _ in range(3))
    first[1], second[1], first[2], second[2] = 49.0, 50.5, 51.0, 49.0
    one = {"title": "tiny", "full": 80.0, "fisher": [before, before], "ours": [first, second]}
    found = vision._losers(one, 400)
    assert found["here"] == "0.8 by 0.25 points" and not found["holds"] and found["why"].endswith("is 2.00 points")
    assert vision._losers(one | {"ours": [before, before]}, 400)["here"] == "none is"
