"""Helpers of the studies and benches: stories, accuracy, energy shares, augmented images and error bounds."""

import contextlib
import random
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.allocate import allocate_ranks
from flexrank.data.batches import Batch, eval_mode
from flexrank.data.images import Scaling
from flexrank.data.metrics import predict
from flexrank.errors import FlexrankError
from flexrank.profiles import SensitivityTable
from flexrank.profiles.costs import Shape, rank_block

#: Distances from the base model count as these at least: tables show hardly smaller ones, and 2,000 images, on which an
#: accuracy has a standard error of .5 to .8 points, do not tell sizes apart that are closer to the base model.
LEAST_DISTANCE, LEAST_IN_ACCURACY = 1e-4, 0.005
#: Separates the stories of a TinyStories file.
STORY_SEPARATOR = "\n<|endoftext|>\n"
#: The longest held-out story, as a multiple of the median length.
LONGEST_STORY = 10


def stories(path: Path) -> list[str]:
    """Returns the stories of a file without separators, where nearly all begin alike; for other files, the whole text.

    Parts longer than LONGEST_STORY times the median length are dropped: in them, many stories that begin differently
    run together.
    """
    parts = re.split(r"\n\n(?=Once upon a time)", path.read_text(encoding="utf8"))
    longest = LONGEST_STORY * statistics.median(map(len, parts))
    return [part for part in parts if len(part) <= longest]


@contextlib.contextmanager
def inference(*models: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside the block; afterwards every submodule has the mode it had before."""
    with eval_mode(*models), torch.inference_mode():
        yield


def accuracy(model: nn.Module, batches: Iterable[Batch], labels: Tensor | Sequence[int]) -> float:
    """Returns the share of rows whose class is the label (N,), in [0, 1].

    With the teacher's classes as labels this is the agreement.
    """
    classes, expected = predict(model, batches), torch.as_tensor(labels)
    if classes.shape != expected.shape:
        raise FlexrankError(f"the batches give classes {tuple(classes.shape)}, the labels are {tuple(expected.shape)}")
    return float((classes == expected).double().mean())


def distance(measure: str, score: float, base: float) -> float:
    """Returns how far a score is from the base model's, at least what is not left to chance.

    A size that classifies better than the base model has the least distance, because its lead is chance.
    """
    return max(LEAST_IN_ACCURACY, base - score) if measure == "accuracy" else max(LEAST_DISTANCE, abs(score - base))


def leading_count(energies: Tensor, share: float) -> int:
    """Returns how many leading components, of falling energies (k,), hold this share; 0 if there is no energy."""
    held = energies.cumsum(0)
    return int((held < share * held[-1]).sum()) + 1 if held[-1] > 0 else 0


def nearest_rank(shape: Shape, share: float) -> int:
    """Returns the rank in whole blocks nearest to this share of the full rank, from 1 to the full rank."""
    full, block = min(shape), rank_block(shape)
    return min(full, round(share * full / block) * block or max(1, round(share * full)))


class AlteredBatches:
    """Endless batches (B, C, H, W) of randomly shifted and mirrored images, reshuffled on every pass.

    This is the usual augmentation of CIFAR-10 (He et al. 2016, section 4.2): each image is padded by `padding` black
    pixels, cropped to its original size, and mirrored with probability 1/2. Batch i depends only on the seed and i.
    The last images of a pass are dropped if they do not fill a batch.
    """

    def __init__(self, images: Tensor, scaling: Scaling, batch_size: int, seed: int, padding: int = 4):
        """`images` are uint8 (N, C, H, W), at least as many as one batch holds."""
        if len(images) < batch_size:
            raise FlexrankError(f"{len(images)} images are fewer than one batch of {batch_size}")
        self._images, self._scaling, self._size = images, scaling, batch_size
        self._seed, self._padding, self._count = seed, padding, 0

    @property
    def per_pass(self) -> int:
        """The number of batches in one pass over all images."""
        return len(self._images) // self._size

    def rows(self, number: int) -> Tensor:
        """Returns the indices (B,) of the images in batch `number`."""
        epoch, position = divmod(number, self.per_pass)
        order = torch.randperm(len(self._images), generator=self._generator("order", epoch))
        return order[position * self._size : (position + 1) * self._size]

    def __iter__(self) -> Iterator[Tensor]:
        """Continues after the last batch of any earlier iteration."""
        while True:
            self._count += 1
            yield self._batch(self._count - 1)

    def _batch(self, number: int) -> Tensor:
        images = self._images[self.rows(number)]
        generator = self._generator("crops", number)
        padded = functional.pad(images, (self._padding,) * 4)
        corners = torch.randint(2 * self._padding + 1, (len(images), 2), generator=generator).tolist()
        height, width = images.shape[2:]
        crops = torch.stack([i[:, y : y + height, x : x + width] for i, (y, x) in zip(padded, corners, strict=True)])
        mirrored = torch.rand(len(images), generator=generator) < 0.5
        return self._scaling(torch.where(mirrored.view(-1, 1, 1, 1), crops.flip(-1), crops))

    def _generator(self, what: str, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(random.Random(f"{self._seed} {what} {number}").getrandbits(31))


def unconstrained_bounds(table: SensitivityTable, budgets: Sequence[float], **rule: Any) -> list[float]:
    """Returns, for each budget, a proven lower bound on the error of any profile within it, nested or not.

    Args:
        rule: `min_saving` and `slack_share`, as for `allocate_ranks`.
    """
    chains = [allocate_ranks(table, [budget], gap=1e-6, **rule) for budget in budgets]
    return [chain.requested[0].error * (1 - (chain.gap or 0.0)) for chain in chains]
