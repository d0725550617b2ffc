"""The text by which a checkpoint knows an objective again."""

import dataclasses
import enum

import numpy as np
import torch

from flexrank.distill.objectives import LogitObjective, describe


class Kind(enum.Enum):
    FIRST, SECOND = 1, 2


def test_an_objective_is_known_by_its_class_and_settings() -> None:
    class Plain:
        def __init__(self, power: float) -> None:
            self.power, self.cache = power, object()

    assert describe(Plain(2.0)) == describe(Plain(2.0)) != describe(Plain(3.0))
    assert "Plain" in describe(Plain(2.0)) and " at 0x" not in describe(Plain(2.0))
    assert describe(LogitObjective(2.0)) == repr(LogitObjective(2.0)) and describe(None) == "None"
    lists = [Plain(2.0), Plain(2.0)]
    lists[0].layers, lists[1].layers = [1, 2], [3, 4]
    assert describe(lists[0]) != describe(lists[1])
    for one, other in (({"a": 1}, {"a": 2}), (torch.float16, torch.bfloat16), ([Kind.FIRST], [Kind.SECOND])):
        lists[0].layers, lists[1].layers = one, other
        assert describe(lists[0]) != describe(lists[1])
    lists[0].layers, lists[1].layers = [], [torch.ones(2)]  # filled by forwards
    assert describe(lists[0]) == describe(lists[1])

    @dataclasses.dataclass
    class Holding:
        helper: object
        power: float = 2.0

    assert describe(Holding(object())) == describe(Holding(object())) != describe(Holding(object(), 3.0))

    @dataclasses.dataclass(frozen=True)
    class Weighing:
        weights: torch.Tensor
        words: frozenset[str] = frozenset()
        parts: tuple[torch.Tensor, ...] = ()
        by_name: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    ones, twos = torch.ones(2000), torch.ones(2000).index_fill(0, torch.tensor([1000]), 2.0)  # repr omits the middle
    assert describe(Weighing(ones)) == describe(Weighing(ones.clone()))
    changed = [
        Weighing(twos),
        Weighing(ones.view(40, 50)),
        Weighing(ones, parts=(ones,)),
        Weighing(ones, parts=(twos,)),
    ]
    changed += [Weighing(ones, by_name={"a": one}) for one in (ones, twos)]
    assert len({*map(describe, changed), describe(Weighing(ones))}) == 7
    assert describe(Weighing(ones, frozenset("dcba"))).index("'a', 'b', 'c', 'd'") > 0
    arrays = ones.numpy(), twos.numpy()
    assert describe(Holding(arrays[0])) == describe(Holding(arrays[0].copy())) != describe(Holding(arrays[1]))
    words, layers = np.array(["a", None], dtype=object), [torch.nn.Linear(2, 2) for _ in range(2)]
    assert "'a'" in describe(Holding(words)) and describe(Holding(layers[0])) == describe(Holding(layers[1]))
    for plain in ((1, 2), (1,), [1, 2], {"a": (1,)}):
        assert describe(Holding(plain)) == repr(Holding(plain))

    class Slotted:
        __slots__ = ("power",)

    assert "Slotted" in describe(Slotted())
