"""The networks on CIFAR-10 that methods are compared on: ResNet-20, and a vision transformer that is trained first."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.data.halves import Half, half_indices
from flexrank.distill.objectives import LogitObjective
from research.benches.quality import Subject
from research.measures import accuracy
from research.studies.vision import network, read_images, short_attention

#: Images for the moments, for the probe, and per training step; levels of the probe.
CALIBRATION, PROBE, BATCH, LEVELS = 512, 128, 64, 10
#: Test images that trials score in the quick form; tables take all of the reporting half.
TRIAL_IMAGES = 2000
#: The transformer's patch embedding is a convolution, which several rivals do not support.
EXCLUDE = {"vit": ("patch_embeddings",), "resnet20": ()}


def subject_of(
    name: str, work: Path, half: Half = "reporting", *, seed: int = 0, is_full: bool = True, steps: int = 0
) -> tuple[Subject, Sequence[Tensor]]:
    """Returns a network of the study `vision`, scored by its accuracy on test images, and its training batches.

    Args:
        work: its parent holds the trained vision transformer.
        seed: draws the images of calibration, probe and training.
        is_full: whether all images of the tuning half are scored, as those of the reporting half are.
        steps: of training; no image is in two of them.
    """
    one, images = network(name, work), read_images()
    rows = half_indices(half, images.test)
    if half == "tuning" and not is_full:
        rows = rows[:TRIAL_IMAGES]
    batches, classes = list(one.batches(images.test[rows])), images.classes[rows]
    order = torch.randperm(len(images.training), generator=torch.Generator().manual_seed(seed))
    calibration, probe, rest = (
        images.training[part] for part in order.tensor_split((CALIBRATION, CALIBRATION + PROBE))
    )
    training = [one.scaling(part) for part in rest[: steps * BATCH].split(BATCH)]

    def score(model: nn.Module) -> dict[str, float]:
        return {"accuracy": accuracy(model, batches, classes)}

    parts = list(one.batches(calibration)), list(one.batches(probe))
    return Subject(one.model, *parts, LogitObjective(), score, EXCLUDE[name]), training


@contextlib.contextmanager
def computing(model: Any, teacher: Any) -> Iterator[None]:
    """Inside the `with` block, both models compute as they do in training."""
    with short_attention(model), short_attention(teacher):
        yield
