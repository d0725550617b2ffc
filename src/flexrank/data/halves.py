"""Splits a held-out set by hash into two fixed halves: settings are chosen on one, and tables report the other."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from flexrank.errors import FlexrankError
from flexrank.files import digest_tensor

Item = TypeVar("Item")
Half = Literal["tuning", "reporting"]
HALVES: tuple[Half, Half] = ("tuning", "reporting")


def half_of(content: str | Tensor) -> Half:
    """The half that a text or a sample's tensor belongs to: the same in every process, whatever else the set holds."""
    digest = hashlib.sha256(content.encode()).hexdigest() if isinstance(content, str) else digest_tensor(content)
    return HALVES[int(digest[:2], 16) % 2]


def select_half(
    half: Half | None, items: Iterable[Item], content: Callable[[Item], Any] = lambda item: item
) -> list[Item]:
    """The items whose `content` is in the half, in their order; `half=None` keeps all.

    Raises:
        FlexrankError: no item is left.
    """
    kept = [item for item in items if half is None or half_of(content(item)) == half]
    if not kept:
        where = "held out" if half is None else f"in the {half} half"
        raise FlexrankError(f"no sample is {where}; give more data")
    return kept


def half_indices(half: Half | None, rows: Tensor) -> Tensor:
    """The indices (k,) of the rows that are in the half, as `select_half` selects them."""
    return torch.tensor(select_half(half, range(len(rows)), rows.__getitem__))
