"""Measures of the studies against plain loops; altered batches are crops that a loop produces too."""

import itertools

import pytest
import torch

import tiny
from flexrank.data.images import Scaling
from flexrank.errors import FlexrankError
from flexrank.profiles.costs import rank_block
from research.measures import AlteredBatches, accuracy, leading_count, nearest_rank

PLAIN = Scaling((0.0,), (1.0,), 1.0)


def test_accuracy_is_a_count() -> None:
    model, batches = tiny.convnet(), [torch.randn(4, 3, 9, 9) for _ in range(3)]
    with torch.no_grad():
        classes = model(torch.cat(batches)).argmax(-1)
    assert accuracy(model, batches, classes) == 1
    labels = classes.clone()
    labels[:3] = (labels[:3] + 1) % 5
    assert accuracy(model, batches, labels.tolist()) == pytest.approx(9 / 12)
    with pytest.raises(FlexrankError, match="labels"):
        accuracy(model, batches, [1, 2])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_leading_components_hold_their_share_and_one_fewer_do_not(share: float) -> None:
    energies = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    count = leading_count(energies, share)
    assert energies[:count].sum() >= share * 16
    assert count == 1 or energies[: count - 1].sum() < share * 16
    assert leading_count(torch.zeros(3, dtype=torch.float64), share) == 0


@pytest.mark.parametrize("full", [4096, 512, 511, 384, 256, 64, 31, 3])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.97, 1.0])
def test_the_nearest_rank_is_of_whole_blocks(full: int, share: float) -> None:
    shape = (full, 2 * full)
    rank, block = nearest_rank(shape, share), rank_block(shape)
    assert 1 <= rank <= full and (rank % block == 0 or rank in (full, max(1, round(share * full))))
    assert abs(rank - share * full) <= max(1, block / 2)


def candidates(image: torch.Tensor) -> dict[tuple[int, int, bool], torch.Tensor]:
    """Every crop of an image (C, 4, 4) in a black frame one pixel wide, and its mirror, pixel by pixel."""
    framed = torch.zeros(len(image), 6, 6)
    framed[:, 1:5, 1:5] = image.float()
    crops = {}
    for top, left in itertools.product(range(3), repeat=2):
        crops[top, left, False] = framed[:, top : top + 4, left : left + 4]
        crops[top, left, True] = torch.stack([framed[:, top : top + 4, left + 3 - x] for x in range(4)], -1)
    return crops


def test_altered_batches_are_crops_and_mirrors_of_the_images_they_name() -> None:
    images = torch.randint(1, 256, (5, 2, 4, 4), dtype=torch.uint8)
    batches = AlteredBatches(images, PLAIN, 2, seed=0, padding=1)
    known = [candidates(image) for image in images]
    drawn, stream = set(), iter(batches)
    for number in range(60):
        batch = next(stream)
        for row, image in zip(batches.rows(number).tolist(), batch, strict=True):
            matching = [key for key, one in known[row].items() if torch.equal(one, image)]
            assert len(matching) == 1, (number, row)
            drawn.add(matching[0])
    assert len(drawn) == 18  # all nine places, mirrored and not, come up


def test_each_pass_has_a_new_order_and_each_image_once_at_most() -> None:
    def of(seed: int) -> AlteredBatches:
        return AlteredBatches(torch.zeros(50, 1, 2, 2, dtype=torch.uint8), PLAIN, 8, seed=seed)

    batches = of(3)
    passes = [torch.cat([batches.rows(6 * epoch + i) for i in range(batches.per_pass)]) for epoch in range(3)]
    assert batches.per_pass == 6 and all(len(set(rows.tolist())) == 48 for rows in passes)
    assert not torch.equal(passes[0], passes[1])
    assert torch.equal(of(3).rows(7), passes[1][8:16]) and not torch.equal(of(4).rows(7), passes[1][8:16])


def test_too_few_images_for_a_batch_are_refused() -> None:
    with pytest.raises(FlexrankError, match="3 images are fewer than one batch of 4"):
        AlteredBatches(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), PLAIN, 4, seed=0)
