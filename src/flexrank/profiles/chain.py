"""Rank profiles, and nested chains of them."""

import dataclasses
import logging
import math
import numbers
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.files import require_keys

log = logging.getLogger("flexrank")


@dataclasses.dataclass(frozen=True)
class RankProfile(Mapping[str, int]):
    """One rank for each factorised layer: the paper's **m** = {r_l}. A mapping from layer name to rank."""

    ranks: Mapping[str, int]

    def __post_init__(self) -> None:
        for name, rank in self.ranks.items():
            if not isinstance(rank, numbers.Integral) or rank < 1:
                raise FlexrankError(f"layer {name!r} has rank {rank!r}; a rank is an integer of at least 1")
        object.__setattr__(self, "ranks", {name: int(rank) for name, rank in self.ranks.items()})

    def __getitem__(self, name: str) -> int:
        return self.ranks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        of = f"ranks {min(self.ranks.values())} to {max(self.ranks.values())}" if self.ranks else "no ranks"
        return f"RankProfile({of} of {len(self.ranks)} layers)"

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.ranks.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self.ranks) == dict(other)

    def fits_in(self, other: Mapping[str, int]) -> bool:
        """Whether every rank is at most the other profile's: self ⪯ other, componentwise."""
        return self.ranks.keys() == other.keys() and all(rank <= other[name] for name, rank in self.ranks.items())


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What the model holds besides its factorised layers' matrices, for whole-model figures."""

    other_parameters: int  # embeddings, norms, biases, dense layers
    other_bytes: int
    bytes_per_parameter: int  # of a factorised layer


@dataclasses.dataclass(frozen=True)
class ChainEntry:
    """One profile of a chain."""

    profile: RankProfile
    parameters: int  # of the factorised layers when deployed, expected slack included
    error: float  # predicted: the sum of the layers' probe errors
    requested: float | None = None  # the budget it was chosen for; None if it only fills the chain

    def __post_init__(self) -> None:
        if not isinstance(self.profile, RankProfile):  # as in a chain that is edited by hand
            object.__setattr__(self, "profile", RankProfile(self.profile))


def require_limits(**limits: float | None) -> None:
    """Raises FlexrankError if a limit is neither None nor a number, or if a budget is not in (0, 1]."""
    for name, limit in limits.items():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, Real)):
            raise FlexrankError(f"{name} is {limit!r}; it is a number")
        if limit is not None and name == "budget" and not 0 < limit <= 1:
            raise FlexrankError(f"budget {limit} is out of range; it is a share of dense parameters, in (0, 1]")


def require_chain(chain: object) -> None:
    """Raises FlexrankError unless this is a ProfileChain."""
    if not isinstance(chain, ProfileChain):
        raise FlexrankError(f"chain is a {type(chain).__name__}; it is a ProfileChain, as allocate_ranks returns")


@dataclasses.dataclass(frozen=True)
class ProfileChain:
    """Componentwise nested profiles in ascending order of cost: the paper's 𝓜*."""

    entries: tuple[ChainEntry, ...]  # from the cheapest to the full model
    dense_parameters: int  # of the factorised layers
    footprint: Footprint  # the rest of the model
    method: str
    gap: float | None = None  # proven relative gap of the requested profiles, if the method proves one

    def __repr__(self) -> str:
        budgets = ", ".join(f"{budget:g}" for budget in self.budgets)
        return f"ProfileChain({self.method}, {len(self.entries)} profiles, budgets {budgets or 'none'})"

    def __post_init__(self) -> None:
        if not self.entries:
            raise FlexrankError("a chain needs at least one profile")
        if self.dense_parameters < 1:
            raise FlexrankError(f"a chain's dense_parameters is {self.dense_parameters!r}; it is at least 1")
        for small, large in zip(self.entries, self.entries[1:], strict=False):
            if small.parameters > large.parameters or not small.profile.fits_in(large.profile):
                raise FlexrankError("a chain's profiles must be nested and rise in cost")

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProfileChain":
        """Returns the chain itself: it is immutable and may be large, so copies of a model share it."""
        return self

    @property
    def requested(self) -> tuple[ChainEntry, ...]:
        """The entries that were chosen for a budget, cheapest first."""
        return tuple(entry for entry in self.entries if entry.requested is not None)

    @property
    def budgets(self) -> tuple[float, ...]:
        """The requested budgets, in ascending order."""
        return tuple(entry.requested for entry in self.entries if entry.requested is not None)

    def at(
        self,
        budget: float | None = None,
        *,
        max_params: int | None = None,
        max_bytes: int | None = None,
        max_error: float | None = None,
    ) -> RankProfile:
        """The largest profile within every limit given; with `max_error` alone, the smallest within that error.

        A requested budget, given alone, returns the profile that was chosen, and is trained, for it.

        Args:
            budget: deployed over dense parameters of the factorised layers, in (0, 1].
            max_params: most parameters of the whole model, with the slack that allocation expected; a size deployed in
                another dtype may have a few more.
            max_bytes: most bytes of the whole model, likewise.
            max_error: largest predicted error.

        Raises:
            FlexrankError: no limit is given, a limit is out of range, or no profile is within them.
        """
        return self.entry_at(budget, max_params=max_params, max_bytes=max_bytes, max_error=max_error).profile

    def entry_at(
        self, budget: float | None = None, *, max_params: int | None = None, max_bytes: int | None = None,
        max_error: float | None = None,
    ) -> ChainEntry:  # fmt: skip
        """Like `at`, but returns the entry, with the profile's cost and predicted error."""
        sizes = (budget, max_params, max_bytes)
        if all(limit is None for limit in (*sizes, max_error)):
            raise FlexrankError("no limit is given; give budget, max_params or max_bytes, or to a chain max_error")
        require_limits(budget=budget, max_params=max_params, max_bytes=max_bytes, max_error=max_error)
        largest = max(self.relative_size(self.entries[-1]), *self.budgets, 0.0)
        if budget is not None and budget > largest * (1 + 1e-12):
            log.warning("budget %g is above the largest size here, %g", budget, largest)
        if max_params is max_bytes is max_error is None and budget in self.budgets:
            return next(entry for entry in self.entries if entry.requested == budget)
        limits = (
            (budget, self.relative_size, "budget"),
            (max_params, self.model_parameters, "max_params"),
            (max_bytes, self.model_bytes, "max_bytes"),
            (max_error, lambda entry: entry.error, "max_error"),
        )
        entries = list(self.entries)
        for limit, measure, name in limits:
            if limit is None:
                continue
            least = min(map(measure, entries))
            entries = [entry for entry in entries if measure(entry) <= limit + 1e-12 * abs(limit)]
            if not entries:
                shown = math.ceil(least * 1e4) / 1e4 if name == "budget" else least  # rounded up, so it is enough
                raise FlexrankError(f"{name}={limit} is too small; the least that this chain offers is {shown}")
        return entries[0] if all(limit is None for limit in sizes) else entries[-1]

    def up_to(self, entry: ChainEntry) -> "ProfileChain":
        """The chain that ends with this entry."""
        return dataclasses.replace(self, entries=self.entries[: self.entries.index(entry) + 1])

    def counted_in(self, width: int) -> "ProfileChain":
        """The chain with its bytes counted as if each of the model's parameters had so many."""
        own = self.footprint
        others = own.other_bytes + own.other_parameters * (width - own.bytes_per_parameter)
        return dataclasses.replace(self, footprint=Footprint(own.other_parameters, others, width))

    def relative_size(self, entry: ChainEntry) -> float:
        """Deployed over dense parameters of the factorised layers (the paper's relative size)."""
        return entry.parameters / self.dense_parameters

    def model_parameters(self, entry: ChainEntry) -> int:
        """Parameters of the whole deployed model."""
        return entry.parameters + self.footprint.other_parameters

    def model_bytes(self, entry: ChainEntry) -> int:
        """Bytes of the whole deployed model's tensors."""
        return entry.parameters * self.footprint.bytes_per_parameter + self.footprint.other_bytes

    def sizes(self) -> list[dict[str, Any]]:
        """A row for each requested budget.

        Its keys are budget, params_layers, params_model, bytes (of tensors), mean_rank and predicted_error.
        """
        return [
            {
                "budget": entry.requested,
                "params_layers": entry.parameters,
                "params_model": self.model_parameters(entry),
                "bytes": self.model_bytes(entry),
                "mean_rank": sum(entry.profile.values()) / len(entry.profile),
                "predicted_error": entry.error,
            }
            for entry in self.requested
        ]

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` reads the same chain; each profile has only the ranks that change."""
        value = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        value["footprint"] = dataclasses.asdict(self.footprint)
        ranks: Mapping[str, int] = {}
        value["entries"] = []
        for entry in self.entries:
            changed = {name: rank for name, rank in entry.profile.items() if ranks.get(name) != rank}
            value["entries"].append({**vars(entry), "profile": changed})
            ranks = entry.profile
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ProfileChain":
        """Reads `to_json`'s object."""
        require_keys(value, ("entries", "dense_parameters", "footprint", "method", "gap"), "profile chain")
        entries: list[ChainEntry] = []
        ranks: dict[str, int] = {}
        for entry in value["entries"]:
            require_keys(entry, ("profile", "parameters", "error", "requested"), "profile chain's entry")
            ranks = ranks | entry["profile"]  # a complete profile in files of format 1
            entries.append(ChainEntry(RankProfile(ranks), entry["parameters"], entry["error"], entry["requested"]))
        require_keys(value["footprint"], tuple(Footprint.__dataclass_fields__), "profile chain's footprint")
        return cls(
            entries=tuple(entries),
            dense_parameters=value["dense_parameters"],
            footprint=Footprint(**value["footprint"]),
            method=value["method"],
            gap=value["gap"],
        )
