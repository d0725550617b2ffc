"""Slack of deployed layers, chosen once for the ranks that are deployed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.files import require_keys
from flexrank.profiles.costs import Shape, deployed_parameters


@dataclasses.dataclass(frozen=True)
class SlackTable:
    """Columns p that gauge alignment leaves unaligned, by layer and rank, chosen by the error bound of one dtype."""

    dtype: str  # such as "bfloat16"
    columns: Mapping[str, Mapping[int, int]] = dataclasses.field(default_factory=dict)

    def at(self, layer: str, rank: int) -> int:
        """The layer's slack at this rank.

        Raises:
            FlexrankError: no slack was chosen for this rank.
        """
        if rank not in self.columns.get(layer, {}):
            raise FlexrankError(f"layer {layer!r}: no slack was chosen for rank {rank}; find_slack for this profile")
        return self.columns[layer][rank]

    def require_dtype(self, dtype: str) -> None:
        """Raises FlexrankError if `dtype` is not the one that the columns were chosen for."""
        if dtype != self.dtype:
            raise FlexrankError(f"this slack was chosen for {self.dtype}; find_slack for {dtype}")

    def parameters(self, profile: Mapping[str, int], shapes: Mapping[str, Shape]) -> int:
        """Deployed parameters of the layers' matrices at this profile, slack included."""
        ranks = {name: rank for name, rank in profile.items() if rank < min(shapes[name])}
        dense = sum(shapes[name][0] * shapes[name][1] for name in profile.keys() - ranks.keys())
        return dense + sum(deployed_parameters(shapes[n], rank, self.at(n, rank)) for n, rank in ranks.items())

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        columns = {name: {str(rank): p for rank, p in by_rank.items()} for name, by_rank in self.columns.items()}
        return {"dtype": self.dtype, "columns": columns}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "SlackTable":
        """Reads `to_json`'s object."""
        require_keys(value, ("dtype", "columns"), "slack table")
        columns = {name: {int(rank): p for rank, p in by_rank.items()} for name, by_rank in value["columns"].items()}
        return cls(value["dtype"], columns)
