"""Which profile a step trains, and at what learning rate."""

import dataclasses
import math
import random
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Draws profiles in proportion to their weights, evenly spread: each round of n draws is stratified."""

    weights: Sequence[float]
    seed: int
    steps: int
    learning_rate: float
    warmup_steps: int
    final_learning_rate: float

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
        return count - 1

    def rate(self, step: int) -> float:
        """The learning rate of the step."""
        return scheduled_rate(step, self.steps, self.learning_rate, self.warmup_steps, self.final_learning_rate)


def scheduled_rate(step: int, steps: int, peak: float, warmup: int, final: float) -> float:
    """Linear rise over `warmup` steps to `peak`, then half a cosine to `final`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2
