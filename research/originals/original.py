"""What an original is, how functions of its clone are imported, and the model that both sides factorise."""

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError
from flexrank.nn.linalg import Factors
from research.machine import random_llama

#: {"what", "difference", "bound", "holds"}; the last two are None if the difference has no bound.
Row = dict[str, Any]
#: Ranks that weights of the tiny model's shapes have in every original.
RANKS = (4, 12, 20)


@dataclasses.dataclass(frozen=True)
class Original:
    """A repository at a commit, and the comparison with it."""

    url: str
    commit: str
    compare: Callable[[Path], list[Row]]
    about: str | None  #: for the page: what is imported, what stands in for what is missing, and what is not run

    def clone_in(self, clones: Path) -> Path:
        """Returns the clone in this directory.

        Raises:
            FlexrankError: it is missing, at another commit, or changed; the message has the commands.
        """
        clone = clones / self.url.rsplit("/", 1)[1]
        commands = f"git clone {self.url} {clone} && git -C {clone} checkout {self.commit}"
        if not (clone / ".git").exists():
            raise FlexrankError(f"{clone}: no clone; run {commands}")
        head = _git(clone, "rev-parse", "HEAD")
        if head != self.commit:
            raise FlexrankError(f"{clone}: at commit {head or 'unknown'}; run git -C {clone} checkout {self.commit}")
        if _git(clone, "status", "--porcelain", "--untracked-files=no", "--", "*.py"):
            raise FlexrankError(f"{clone}: code differs from the commit; run git -C {clone} reset --hard")
        return clone


def _git(clone: Path, *arguments: str) -> str:
    command = ["git", "-C", str(clone), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@contextlib.contextmanager
def importing(clone: Path, stubs: Mapping[str, ModuleType] | None = None) -> Iterator[None]:
    """Inside the `with` block, the clone's modules are imported by their own names, with stubs for missing ones.

    Afterwards all of them are forgotten, because clones have modules of the same names. What they print goes to
    standard error.
    """
    before = dict(sys.modules)
    sys.modules.update(stubs or {})
    sys.path.insert(0, str(clone))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path.remove(str(clone))
        for name in [name for name in sys.modules if name not in before and _is_of(clone, name, stubs or {})]:
            del sys.modules[name]


def _is_of(clone: Path, name: str, stubs: Mapping[str, ModuleType]) -> bool:
    module = sys.modules[name]
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return name in stubs or any(place and Path(place).is_relative_to(clone) for place in places)


def tiny_model() -> tuple[Any, dict[str, nn.Linear], Sequence[Batch]]:
    """Returns a random Llama in float32, the layers of its blocks, and six batches of one row of 64 tokens."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 128}
    model = random_llama(**sizes, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True)
    for parameter in model.parameters():  # otherwise logits are too even for gradients to matter
        parameter.data.mul_(3 if parameter.ndim > 1 else 1)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and "layers" in name}
    ids = torch.randint(128, (6, 1, 64), generator=torch.Generator().manual_seed(1))
    return model, layers, [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]


def product(factors: Factors, rank: int) -> Tensor:
    """Returns the layer at this rank, (m, n)."""
    return factors.u[:rank].T @ factors.v[:rank]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Returns ‖ours − theirs‖ / ‖ours‖."""
    ours = ours.detach().double()
    return float((ours - theirs.detach().double()).norm() / ours.norm())


def row(what: str, differences: Sequence[float], bound: float | None = None) -> Row:
    """Returns a row of the largest difference."""
    largest = max(differences)
    return {"what": what, "difference": largest, "bound": bound, "holds": None if bound is None else largest <= bound}
