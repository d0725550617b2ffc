"""A stack of blocks, and which layers of a model belong to which of them, by the order in which they run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from flexrank.calibrate.groups import Hooks


class Part(NamedTuple):
    """Layers calibrated together.

    Attributes:
        names: of the layers.
        until: the block after whose return nothing of the part runs; None where the whole model has to.
    """

    names: tuple[str, ...]
    until: nn.Module | None


def block_stack(model: nn.Module, layers: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """The children of the ModuleList or Sequential that holds most of these layers; none where there is no such."""
    best: list[tuple[str, nn.Module]] = []
    names, most = list(layers), 0
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children: Mapping[str, nn.Module] = dict(module.named_children())
        prefix = f"{name}." if name else ""
        held = sum(layer.startswith(f"{prefix}{child}.") for layer in names for child in children)
        if held > most and len(children) > 1:
            most, best = held, [(f"{prefix}{child}", block) for child, block in children.items()]
    return best


class BlockOrder:
    """Sees one forward of a model: where, among the blocks, each layer runs last."""

    def __init__(self, blocks: Sequence[nn.Module]):
        self._blocks = blocks
        self._started: list[int] = []
        self._returned: list[int] = []
        self._places: dict[str, tuple[int, int]] = {}  # blocks started and returned at the layer's last call

    def watch(self, hooks: Hooks, layers: Mapping[str, nn.Module]) -> None:
        """Hooks blocks and layers for the length of `hooks`."""
        for place, block in enumerate(self._blocks):
            hooks.add(block.register_forward_pre_hook(_note(self._started, place)))
            hooks.add(block.register_forward_hook(_note(self._returned, place)))
        for name, layer in layers.items():
            hooks.add(layer.register_forward_pre_hook(self._placed(name)))

    def _placed(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self._places[name] = (len(self._started), len(self._returned))

        return hook

    @property
    def in_order(self) -> bool:
        """Whether each block ran once, in the stack's order, one after the other."""
        return self._started == self._returned == list(range(len(self._blocks)))

    def parts(self) -> list[Part]:
        """The parts, the last to run first: what replaces a part's layers changes nothing that runs before them."""
        by_place: dict[tuple[int, int], list[str]] = {}
        for name, place in self._places.items():
            by_place.setdefault(place, []).append(name)
        parts = []
        for place in sorted(by_place, reverse=True):
            returned = place[1]
            until = self._blocks[returned] if returned < len(self._blocks) else None
            parts.append(Part(tuple(by_place[place]), until))
        return parts


def _note(places: list[int], place: int) -> Callable[..., Any]:
    def hook(*_: object) -> None:
        places.append(place)

    return hook
