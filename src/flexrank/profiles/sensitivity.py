"""What probing measured: the error of each layer alone at each probed rank."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from flexrank.files import require_keys
from flexrank.profiles.chain import Footprint


@dataclasses.dataclass(frozen=True)
class SensitivityTable:
    """Probe results S (L × K): the error of truncating one layer alone to one rank (FlexRank, appendix C.2)."""

    shapes: Mapping[str, tuple[int, int]]  # layer name to (m, n)
    ranks: Mapping[str, tuple[int, ...]]  # the probed ranks, rising; the last is full rank
    errors: Mapping[str, tuple[float, ...]]  # evaluate(truncated) − evaluate(full) at those ranks; the last is 0
    baseline: float  # evaluate(model) at full rank
    footprint: Footprint  # the rest of the model

    def predicted_error(self, profile: Mapping[str, int]) -> float:
        """The sum of the layers' errors at these ranks, interpolated linearly between probed ranks."""
        return sum(float(np.interp(profile[name], self.ranks[name], self.errors[name])) for name in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back bit for bit."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "SensitivityTable":
        """Reads `to_json`'s object."""
        require_keys(value, ("shapes", "ranks", "errors", "baseline", "footprint"), "sensitivity table")
        return cls(
            shapes={name: (int(m), int(n)) for name, (m, n) in value["shapes"].items()},
            ranks={name: tuple(map(int, ranks)) for name, ranks in value["ranks"].items()},
            errors={name: tuple(map(float, errors)) for name, errors in value["errors"].items()},
            baseline=float(value["baseline"]),
            footprint=Footprint(**value["footprint"]),
        )
