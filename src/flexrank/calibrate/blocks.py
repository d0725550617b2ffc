"""The stack of blocks of a model, and in which of its sections each layer runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from flexrank.calibrate.hooks import Event


class Section(NamedTuple):
    """The layers of one block of the stack, or those that run between two blocks, before the first or after the last.

    Attributes:
        names: of the layers.
        until: the block after whose return none of the layers runs; None where the whole model has to run.
    """

    names: tuple[str, ...]
    until: nn.Module | None


def block_stack(model: nn.Module, layers: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """The named children of the ModuleList or Sequential that holds most of these layers; empty without such a one."""
    best: list[tuple[str, nn.Module]] = []
    names, most = list(layers), 0
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = dict(module.named_children())
        prefix = f"{name}." if name else ""
        held = sum(layer.startswith(f"{prefix}{child}.") for layer in names for child in children)
        if held > most and len(children) > 1:
            most, best = held, [(f"{prefix}{child}", block) for child, block in children.items()]
    return best


def runs_in_order(forwards: Iterable[Sequence[Event]], blocks: Sequence[nn.Module]) -> bool:
    """Whether every forward runs each block once, one after the other, in this order."""
    wanted = [(block, returns) for block in blocks for returns in (False, True)]
    chosen = set(wanted)
    return all([event for event in forward if event in chosen] == wanted for forward in forwards)


def find_sections(
    forward: Sequence[Event], blocks: Sequence[nn.Module], layers: Mapping[str, nn.Module]
) -> list[Section]:
    """The sections of one forward, the last to run first, each layer where it runs last."""
    places: dict[nn.Module, tuple[int, int]] = {}
    chosen, started, returned = set(blocks), 0, 0
    for module, returns in forward:
        if module in chosen:
            started, returned = started + (not returns), returned + returns
        if not returns:
            places[module] = (started, returned)
    by_place: dict[tuple[int, int], list[str]] = {}
    for name, layer in layers.items():
        by_place.setdefault(places[layer], []).append(name)
    untils = [*blocks, None]
    return [Section(tuple(by_place[place]), untils[place[1]]) for place in sorted(by_place, reverse=True)]
