"""Independent training of each block against end-to-end consolidation (FlexRank, Fig. 6b).

In layerwise training every block of the student reads what the base model's block reads and is trained to match its
output, so it adapts only to its own nonlinearity: no gradient crosses a block, and no block sees another's error. What
is outside the blocks, such as an untied head, is not trained this way.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.calibrate import Hooks
from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError
from flexrank.nn.blocks import block_stack
from flexrank.nn.switch import nested_layers
from research.experiment import Experiment, Request
from research.figures import NEUTRAL, OTHER, OURS
from research.result import Result, between, claim, measured, spreads
from research.studies.language import LanguageBench, draw_by_budget, stories_settings


def run(request: Request) -> Result:
    """Runs the study; both trainings get the configured steps."""
    bench = LanguageBench(request)
    alone = bench.ledger.take_seeds("blocks alone", request.seeds, _blocks_alone, bench)
    together, untrained, dense = bench.consolidated(request.seeds), bench.untrained(), bench.dense()
    runs = {**untrained, "each block alone": alone, "end to end": together}
    tables = [bench.table([[name, *spreads(of)] for name, of in runs.items()])]
    claims = [_claim(bench.budgets, untrained["untrained"][0], alone, together, dense)]
    data = {"budgets": bench.budgets, "runs": runs, "dense": dense}
    return measured(bench.facts(seeds=request.seeds), tables, claims, data)


def _blocks_alone(bench: LanguageBench, seed: int) -> list[float]:
    model, path = bench.decomposed(), bench.ledger.directory / f"training-{seed}"
    with teacher_forced_blocks(bench.base, model) as objective:
        bench.train_(model, bench.profiles[::-1], bench.steps, path, seed=seed, objective=objective, teacher_cache=0)
    return bench.nats_by_budget(model)


class BlockObjective:
    """Mean over blocks of ‖h − h*‖² / ‖h*‖² of their outputs h and the base model's h*; logits are not read.

    By block, it holds the inputs and outputs of the base model's last forward pass, and the student's outputs on these.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.targets: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def target(self, output: Any, batch: Batch) -> Tensor:
        """Returns the base model's block outputs, (blocks, B, T, d); its forward pass was the last."""
        return torch.stack([*self.targets.values()])

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """Returns the loss that the class describes."""
        pairs = [(own.float(), wanted.float()) for own, wanted in zip(self.outputs.values(), target, strict=True)]
        return torch.stack([(own - to).square().sum() / to.square().sum() for own, to in pairs]).mean()


@contextlib.contextmanager
def teacher_forced_blocks(teacher: nn.Module, student: nn.Module) -> Iterator[BlockObjective]:
    """Makes the student's blocks read what the teacher's read last; yields the objective to train each block alone."""
    blocks = dict(block_stack(student, nested_layers(student)))
    if not blocks:
        raise FlexrankError(f"{type(student).__name__} has no stack of blocks to train one by one")
    objective = BlockObjective()

    def record(name: str, inputs: Tensor, output: Any) -> None:
        objective.inputs[name], objective.targets[name] = inputs.detach(), _first(output).detach()

    def feed(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (objective.inputs[name], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": objective.inputs[name]}

    def keep(name: str, _: Tensor, output: Any) -> None:
        objective.outputs[name] = _first(output)

    with Hooks() as hooks:
        hooks.on_forward({name: teacher.get_submodule(name) for name in blocks}, record)
        for name, block in blocks.items():
            hooks.remove_on_exit(block.register_forward_pre_hook(functools.partial(feed, name), with_kwargs=True))
        hooks.on_forward(blocks, keep)
        yield objective


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _claim(budgets: Sequence[float], untrained: Any, alone: Any, together: Any, dense: float) -> dict[str, Any]:
    """Claims what each way wins back of the loss above the original's, where that exceeds .1 % of it."""
    parts, better = [], []
    for place, (budget, least) in enumerate(zip(budgets, untrained, strict=True)):
        if least > dense * 1.001:
            own, whole = ([1 - (one[place] - dense) / (least - dense) for one in runs] for runs in (alone, together))
            parts.append(f"{budget:g} {between(own, '.0%')} and {between(whole, '.0%')}")
            better.append(min(whole) > max(own))
    what = "training each block alone wins back less than training end to end, at every budget and seed"
    here = f"of the loss above the original's is won back, alone and end to end: {', '.join(parts)}"
    holds = all(better) if better else None
    return claim(what, "independent layer training stays persistently poor", here, holds, "not known")


EXPERIMENT = Experiment(
    "layerwise", "Each block trained alone, and all end to end",
    "what training each block alone wins back, against end-to-end consolidation with as many steps",
    minutes=6, full_minutes=60, run=run, draw=functools.partial(draw_by_budget, colours=(NEUTRAL, OTHER, OURS)),
    seeds=(3, 3), settings=stories_settings, paper="independent layer training is ineffective (Fig. 6b)",
)  # fmt: skip
