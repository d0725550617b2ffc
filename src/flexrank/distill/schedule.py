"""The profile, batches and learning rate of each step; a resumed run repeats them."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flexrank.data.batches import Batch, require_alike, require_several
from flexrank.errors import FlexrankError

#: How often `balanced` draws the largest profile below the full model, relative to any other.
LARGEST_WEIGHT = 2.0
#: For a running mean of losses: the old mean's weight in an update, and the floor relative to the largest mean.
MEMORY, LEAST_LOSS = 0.9, 1e-4


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Draws profiles in proportion to their weights, evenly spread: each round of n draws is stratified."""

    weights: Sequence[float]
    seed: int
    steps: int
    learning_rate: float
    warmup_steps: int

    def draw(self, step: int) -> int:
        """The index of the step's profile."""
        count = len(self.weights)
        generator = random.Random(f"{self.seed} profiles {step // count}")
        strata = list(range(count))
        generator.shuffle(strata)
        point = (strata[step % count] + generator.random()) / count * sum(self.weights)
        for index, weight in enumerate(self.weights):
            point -= weight
            if point < 0:
                return index
        return max(index for index, weight in enumerate(self.weights) if weight)  # reached only by rounding

    def rate(self, step: int) -> float:
        """The learning rate of the step."""
        return scheduled_rate(step, self.steps, self.learning_rate, self.warmup_steps)


def drawn_weights(given: Sequence[float] | None, method: str, is_full: Sequence[bool]) -> list[float]:
    """How often each profile is drawn relative to the others, cheapest first: as `given`, or as `method` says.

    `is_full` marks the full model, which `balanced` never draws, because it is the base model: it shares nothing that
    is trained. So it raises FlexrankError if there is no other.
    """
    weights = [1.0] * len(is_full) if given is None else list(map(float, given))
    if method != "balanced":
        return weights
    if all(is_full):
        raise FlexrankError("the only size is the full model, which is the base model; give a smaller one to train")
    if given is None:
        weights[max(index for index, full in enumerate(is_full) if not full)] = LARGEST_WEIGHT
    return [0.0 if full else weight for weight, full in zip(weights, is_full, strict=True)]


def scheduled_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear rise over `warmup` steps to `peak`, then half a cosine to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (1 + math.cos(math.pi * progress)) / 2


class RunningLosses:
    """The running mean of each profile's losses so far in consolidation: `means`, by profile index."""

    def __init__(self) -> None:
        self.means: dict[int, float] = {}

    def extend(self, losses: Sequence[float], choices: Sequence[int]) -> None:
        """Adds steps."""
        for loss, choice in zip(losses, choices, strict=True):
            self.add(loss, choice)

    def add(self, loss: float, choice: int) -> None:
        """Adds a step's loss and the index of its profile."""
        self.means[choice] = MEMORY * self.means.get(choice, loss) + (1 - MEMORY) * loss

    def mean(self, choice: int) -> float | None:
        """The running mean of a profile's losses, or None before its first step.

        It is at least LEAST_LOSS of the largest: a size as good as the teacher has only rounding errors to learn.
        """
        if choice not in self.means:
            return None
        return max(self.means[choice], LEAST_LOSS * max(self.means.values()))

    def vector_scales(self, size_indices: Sequence[int]) -> list[float]:
        """For each size, the square root of its mean loss over the largest; 1 before its first step.

        A loss grows with the square of the distance from the teacher. The profile of index i is the size
        `size_indices[i]`.
        """
        scales, greatest = [1.0] * (max(size_indices) + 1), max(self.means.values(), default=0.0)
        for choice in self.means if greatest > 0 else ():
            scales[size_indices[choice]] = math.sqrt(max(self.means[choice] / greatest, LEAST_LOSS))
        return scales


class Feed:
    """Batches without end. A sequence is shuffled by (seed, pass); an iterable keeps its own order."""

    def __init__(self, batches: Sequence[Batch] | Iterable[Batch], seed: int):
        require_several(batches)
        self._batches, self._seed, self._count = batches, seed, 0
        self._given = 0  # batches since this process started
        self._iterator: Iterator[Batch] = iter(())
        self._rewind: Callable[[], None] | None = None  # before the pass after a restored one

    def next(self) -> tuple[int | None, Batch]:
        """The next batch's index in the sequence (None if the batches are an iterable), and the batch."""
        index, batches = None, self._batches
        if isinstance(batches, Sequence) and batches:
            epoch, position = divmod(self._count, len(batches))
            index = _order(len(batches), self._seed, epoch)[position]
            batch = batches[index]
        else:
            batch = self._next_of_iterable()
        self._count += 1
        require_alike(self._given, batch)
        self._given += 1
        return index, batch

    def _next_of_iterable(self) -> Batch:
        for _ in range(3):  # the current pass may be at its end, and so may the pass of a loader that was restored
            for batch in self._iterator:
                return batch
            if self._rewind is not None:
                self._rewind()
                self._rewind = None
            self._iterator = iter(self._batches)
        raise FlexrankError("distillation got no batches; it needs some, which an iterable gives again on each pass")

    def state(self) -> dict[str, Any]:
        """The position in the data, as a JSON object that may hold tensors."""
        own, generator = getattr(self._batches, "state_dict", None), self._generator()
        drawn = None if generator is None else generator.get_state()
        return {"count": self._count, "loader": own() if callable(own) else None, "generator": drawn}

    def _generator(self) -> torch.Generator | None:
        """The generator by which a loader shuffles, if it has one."""
        generator = getattr(self._batches, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`: by the loader's `load_state_dict` if it has one, otherwise by skipping batches."""
        if not isinstance(self._batches, Sequence):
            load = getattr(self._batches, "load_state_dict", None)
            if callable(load) and state["loader"] is not None:
                self._rewind = _rewinding(self._batches)
                load(state["loader"])
                self._iterator = iter(self._batches)
                # torchdata's restarts its pass, and has then drawn once more than the loader whose state this is.
                generator, drawn = self._generator(), state.get("generator")
                if generator is not None and drawn is not None:
                    generator.set_state(drawn)
            else:
                for _ in range(state["count"]):
                    self._next_of_iterable()
        self._count = state["count"]


def _rewinding(batches: Any) -> Callable[[], None] | None:
    """Sets a stream of `datasets`, or a loader's, to where it is now; every pass begins where it was last set to."""
    source = getattr(batches, "dataset", batches)
    if type(source).__module__.partition(".")[0] != "datasets" or not hasattr(source, "load_state_dict"):
        return None
    return functools.partial(source.load_state_dict, source.state_dict())


@functools.lru_cache(2)
def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed} batches {epoch}").shuffle(order)
    return order
