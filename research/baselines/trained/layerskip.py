"""LayerSkip: layer dropout and an early-exit loss, so that the first blocks are a model (Elhoushi et al., ACL 2024).

A sample skips block l of L with probability p · (exp(l ln 2 / (L − 1)) − 1). A step has the loss of the last block and
of one other, in turn (the paper's rotational curriculum), with weights proportional to the sums 0 + 1 + … + l. All
exits share the model's final norm and head. A size has as many of the first blocks as fit.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.data.batches import Batch
from flexrank.distill.objectives import Objective
from flexrank.hf.models import hidden_states
from flexrank.nn.blocks import block_stack, replaced_forwards
from research.baselines.method import NotApplicable, parameter_count
from research.baselines.trained.task import Settings, Size, TrainedMethod, TrainingTask, rates

#: The paper's values for continued pretraining: the last block's dropout, and the scale of early losses.
DROPOUT, EXIT_SCALE = 0.1, 0.2
#: What follows the blocks of Llama and similar models, of GPT-2, and of ViT.
ENDS = (("model.norm", "lm_head"), ("transformer.ln_f", "lm_head"), ("vit.layernorm", "classifier"))


def dropout_rates(blocks: int) -> list[float]:
    """Returns the probability with which a sample skips each block; none skips the first."""
    return [DROPOUT * (math.exp(place * math.log(2) / max(1, blocks - 1)) - 1) for place in range(blocks)]


def exit_weights(blocks: int) -> list[float]:
    """Returns e(l) of the paper, before the weights of a step's two exits are scaled to a sum of one."""
    early = [EXIT_SCALE * sum(range(place + 1)) for place in range(blocks - 1)]
    return [*early, blocks - 1 + EXIT_SCALE * sum(range(blocks - 1))]


@dataclasses.dataclass
class ExitObjective:
    """The weighted loss of the last exit and of an earlier one."""

    inner: Objective
    model: nn.Module
    blocks: int
    place: int = 0  #: the block of the earlier exit

    def target(self, output: Any, batch: Batch) -> Tensor:
        """Returns the inner objective's target."""
        return self.inner.target(output, batch)

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """Returns (e(l) L_l + e(L) L_L) / (e(l) + e(L))."""
        weights = exit_weights(self.blocks)
        early = max(weights[self.place], EXIT_SCALE)  # e is zero for the first block, which is a size too
        own = self.inner.loss(exit_output(self.model, output, self.place), target, batch)
        return (early * own + weights[-1] * self.inner.loss(output, target, batch)) / (early + weights[-1])


def exits(model: nn.Module, layers: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Returns the blocks after which the model can end, by name.

    Raises:
            NotApplicable: there is no stack of blocks, or what follows it is unknown.
    """
    blocks = block_stack(model, layers)
    if not blocks or not _end(model):
        raise NotApplicable(f"{type(model).__name__}: its blocks, or the norm and the head after them, are not known")
    return blocks


def _end(model: nn.Module) -> tuple[nn.Module, nn.Module | None] | None:
    """Returns the norm and the head that follow the blocks; None if they are unknown."""
    modules = dict(model.named_modules())
    if getattr(model, "base_model", None) is model:  # no head; BERT and its like have all norms in the blocks
        norms = (one for name, one in model.named_children() if "norm" in name or name == "ln_f")
        return next(norms, nn.Identity()), None
    return next(((modules[norm], modules[head]) for norm, head in ENDS if {norm, head} <= modules.keys()), None)


def exit_output(model: nn.Module, output: Any, place: int) -> Any:
    """Returns what the model would if block `place` were its last, from the hidden states of a full forward pass."""
    end = _end(model)
    assert end is not None
    norm, head = end
    states = norm(output.hidden_states[place + 1])
    if head is None:
        return SimpleNamespace(last_hidden_state=states, hidden_states=(states,))
    is_classifier = output.logits.ndim < states.ndim  # a classifier reads the first token
    return SimpleNamespace(logits=head(states[:, 0] if is_classifier else states), hidden_states=(states,))


def sizes(task: TrainingTask, settings: Settings) -> Iterator[Size]:
    """Trains all depths together, and all weights."""
    model = copy.deepcopy(task.teacher)
    blocks = exits(model, task.layers)
    objective = ExitObjective(task.objective, model, len(blocks))

    def prepare(step: int) -> None:
        objective.place = step % (len(blocks) - 1)

    with hidden_states(model), skipping([block for _, block in blocks], random.Random(f"{task.seed} dropout")):
        task.train_(model, task.weights(model), objective, task.steps, task.learning_rate(settings), prepare)
    for budget in task.budgets:
        depth = depth_within(task, dict(blocks), task.parameter_limit(budget))
        if depth is None:
            yield None
            continue
        with first_blocks(model, depth) as size:
            yield size, parameter_count(size)


def skipping(blocks: Sequence[nn.Module], draw: random.Random) -> contextlib.AbstractContextManager[None]:
    """Inside the `with` block, each sample of a batch (B, T, d) skips blocks by `dropout_rates`."""

    def forward(own: Callable[..., Tensor], rate: float, states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        kept = torch.tensor([draw.random() >= rate for _ in states], device=states.device)
        return torch.where(kept[:, None, None], own(states, *arguments, **named), states)

    pairs = zip(blocks, dropout_rates(len(blocks)), strict=True)
    return replaced_forwards({block: functools.partial(forward, block.forward, rate) for block, rate in pairs})


def depth_within(task: TrainingTask, blocks: Mapping[str, nn.Module], limit: int) -> int | None:
    """Returns the largest number of first blocks whose model has at most `limit` parameters; None if none fits."""
    own = list(map(parameter_count, blocks.values()))
    rest = parameter_count(task.teacher) - sum(own)
    depths = [depth for depth in range(1, len(own) + 1) if rest + sum(own[:depth]) <= limit]
    return max(depths, default=None)


@contextlib.contextmanager
def first_blocks(model: nn.Module, depth: int) -> Iterator[nn.Module]:
    """Inside the `with` block, the model has only its first `depth` blocks."""
    name, _ = block_stack(model, [name for name, _ in model.named_modules()])[0]
    owner, _, own = name.rpartition(".")[0].rpartition(".")
    parent: Any = model.get_submodule(owner)
    config: Any = model.config
    whole, count = getattr(parent, own), config.num_hidden_layers
    setattr(parent, own, whole[:depth])
    config.num_hidden_layers = depth
    try:
        yield model
    finally:
        setattr(parent, own, whole)
        config.num_hidden_layers = count


LAYERSKIP = TrainedMethod(
    "layerskip", "Elhoushi et al., ACL 2024", True, rates("times_usual", 0.5, 1.0, 2.0, 4.0), sizes
)
