"""Networks on images as comparisons take them: who is scored, who is trained on, and which rivals apply."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.data.halves import half_of
from flexrank.data.images import Scaling
from flexrank.nn.blocks import block_stack
from flexrank.nn.select import select_layers
from research.baselines.method import NotApplicable
from research.baselines.trained import TRAINED_METHODS
from research.baselines.trained.channels import find_units
from research.benches import images, training_benchmarks, training_free
from research.benches.compare_trained import method_unit, sensitivity_unit
from research.benches.training_free import DecomposedModel
from research.experiment import Request
from research.figures import name_distances, panels, shown_distance
from research.studies.cifar import ResNet20
from research.studies.vision import Images, Network
from tiny import build

SCALING = Scaling((0.5,) * 3, (0.25,) * 3)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    training, test = (torch.randint(256, (count, 3, 8, 8), generator=random).byte() for count in (90, 40))
    classes = torch.randint(5, (40,), generator=random)
    small = {"CALIBRATION": 16, "PROBE": 8, "BATCH": 6, "LEVELS": 6, "EXCLUDE": {"resnet20": ()}}
    for name, value in small.items():
        monkeypatch.setattr(images, name, value)
    network = Network("resnet20", "convolutions", build("convnet"), SCALING, 1e-3, "digest")
    monkeypatch.setattr(images, "network", lambda *_: network)
    monkeypatch.setattr(images, "read_images", lambda: Images(training, test, classes))
    monkeypatch.setattr(training_benchmarks, "STEPS", {"resnet20": (8, 10)})


def bytes_of(batches: Any) -> list[bytes]:
    return [row.numpy().tobytes() for batch in batches for row in batch]


def test_no_image_has_two_uses(tmp_path: Path) -> None:
    subject, training = images.subject_of("resnet20", tmp_path, steps=8)
    parts = [bytes_of(one) for one in (subject.calibration, subject.probe, training)]
    assert [len(one) for one in parts] == [16, 8, 48] and len({row for one in parts for row in one}) == 72
    scaled = {row.numpy().tobytes() for row in SCALING(images.read_images().training)}
    assert all(row in scaled for one in parts for row in one)
    other, _ = images.subject_of("resnet20", tmp_path, seed=1)
    assert bytes_of(other.calibration) != parts[0]


@torch.no_grad()
def test_the_score_is_the_share_of_the_half_that_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: image by image; only trials score fewer images."""
    monkeypatch.setattr(images, "TRIAL_IMAGES", 5)
    everything, model = images.read_images(), build("convnet").eval()
    for half in ("reporting", "tuning"):
        own = [place for place, image in enumerate(everything.test) if half_of(image) == half]
        right = [int(model(SCALING(everything.test[[at]])).argmax()) == int(everything.classes[at]) for at in own]
        subject, _ = images.subject_of("resnet20", tmp_path, half)
        assert subject.score(model) == {"accuracy": sum(right) / len(own)}
        few, scored = images.subject_of("resnet20", tmp_path, half, is_full=False)[0], right[: {"tuning": 5}.get(half)]
        assert few.score(model) == {"accuracy": sum(scored) / len(scored)}


@pytest.mark.parametrize("full", [False, True])
def test_only_trials_of_the_quick_form_score_fewer_images(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a count of each half's images. Finished trials of one form are not those of the other."""
    monkeypatch.setattr(images, "TRIAL_IMAGES", 5)
    monkeypatch.setattr(images, "accuracy", lambda _model, _batches, classes: len(classes))
    counts = Counter(map(half_of, images.read_images().test))
    for half, wanted in {"reporting": counts["reporting"], "tuning": counts["tuning"] if full else 5}.items():
        request = Request(tmp_path, model="resnet20", full=full, half=half)
        (free,), (trained,) = training_free.benchmarks(request), training_benchmarks.training_benchmarks(request)
        for subject in (free.subject(0), trained.subject_and_batches(0, half)[0]):
            assert subject.score(subject.teacher) == {"accuracy": wanted}
        assert free.facts["full"] == trained.facts["full"] == full


def test_accuracy_is_drawn_as_it_is_lost_and_nats_by_a_logarithm() -> None:
    assert shown_distance("accuracy", 0.8, 0.75) == pytest.approx(-0.05)
    assert shown_distance("nats", 1.5, 2.0) == 0.5 and shown_distance("nats", 2.0, 2.0) == 1e-4
    _, axes = panels(2)
    for place, measure in zip(axes, ("accuracy", "nats"), strict=True):
        name_distances(place, measure)
    assert [one.get_yscale() for one in axes] == ["linear", "log"]


def test_rivals_without_training_know_convolutions(tmp_path: Path) -> None:
    (one,) = training_free.benchmarks(Request(tmp_path, model="resnet20"))
    assert (one.name, one.measure, one.levels) == ("resnet20", "accuracy", 10)
    for method in training_free.METHODS:
        model, *_ = DecomposedModel(one, method, 0)._decomposition
        assert one.subject(0).score(model).keys() == {"accuracy"}


def test_widths_are_not_of_a_network_of_residual_blocks() -> None:
    model = ResNet20()
    blocks = [name for name, _ in block_stack(model, select_layers(model))]
    with pytest.raises(NotApplicable, match="heads and channels are not known"):
        find_units(model, blocks)


def test_trained_rivals_that_know_no_convolutions_say_so(tmp_path: Path) -> None:
    request = Request(tmp_path, model="resnet20", jobs=0)
    (benchmark,) = training_benchmarks.training_benchmarks(request)
    assert (benchmark.steps, benchmark.default_rate) == (8, 1e-3)
    sensitivity, found = sensitivity_unit(request, "resnet20", 0), {}
    for name, method in TRAINED_METHODS.items():
        (rate,) = method.trials[0].values()
        rates = (rate,) * len(benchmark.budgets)
        unit = method_unit(request, "resnet20", name, rates, 0, "reporting", 1.0, False, sensitivity)
        found[name] = "obstacle" not in unit
    assert [name for name, applies in found.items() if applies] == ["flexrank", "flexrank, printed", "independent"]
