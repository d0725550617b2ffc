"""Two halves of a held-out set: every item in one of them, always the same."""

import hashlib

import numpy as np
import pytest
import torch

from flexrank.data.halves import half_of, select_half
from flexrank.errors import FlexrankError


def test_each_item_is_in_one_half_by_the_first_byte_of_its_digest() -> None:
    texts = [f"text {number}" for number in range(400)]
    tuning, reporting = (select_half(half, texts) for half in ("tuning", "reporting"))
    assert reporting == [text for text in texts if hashlib.sha256(text.encode()).digest()[0] % 2]
    assert sorted(tuning + reporting) == sorted(texts) and 150 < len(tuning) < 250
    assert select_half(None, texts) == texts and select_half("tuning", texts[::-1]) == tuning[::-1]


def test_samples_of_numbers_are_known_by_their_values() -> None:
    ids = torch.arange(12).reshape(3, 4).T
    for row in ids:
        wanted = hashlib.sha256(np.array(row.tolist()).tobytes()).digest()[0] % 2
        assert half_of(row) == ("tuning", "reporting")[wanted]


def test_a_half_without_an_item_is_an_error() -> None:
    (only,) = {"tuning", "reporting"} - {half_of("one")}
    with pytest.raises(FlexrankError, match=f"no sample is in the {only} half"):
        select_half(only, ["one"])
    with pytest.raises(FlexrankError, match="no sample is held out; give more data"):
        select_half(None, [])
    assert select_half("tuning", [0, 1, 2, 3], "abcd".__getitem__) == [
        i for i in range(4) if half_of("abcd"[i]) == "tuning"
    ]
