"""Independent training of each block against end-to-end consolidation (FlexRank, Fig. 6b).

Layerwise, every block of the student reads what the base model's block reads and is held to what that gives out, so
that it adapts to its own nonlinearity alone: no gradient crosses a block, and no block sees another's error. What is
outside the blocks, an untied head, is not trained so.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.calibrate import Hooks, block_stack
from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError
from flexrank.nn.switch import nested_layers
from research.experiment import Experiment, Request
from research.figures import NEUTRAL, OTHER, OURS, draw_level, draw_seeds
from research.result import Result, between, claim, measured, spreads
from research.studies.language import LanguageBench, nats_panel, stories_settings

ROWS = ("DataSVD, untrained", "each block alone", "end to end")


def run(request: Request) -> Result:
    """Runs the study: both trainings get the configured steps."""
    bench = LanguageBench(request)
    alone = bench.ledger.take_seeds("blocks alone", request.seeds, _blocks_alone, bench)
    together, untrained, dense = bench.consolidated(request.seeds), bench.untrained(), bench.dense()
    runs = dict(zip(ROWS, ([untrained], alone, together), strict=True))
    tables = [bench.table([[name, *spreads(of)] for name, of in runs.items()])]
    claims = [_claim(bench.budgets, untrained, alone, together, dense)]
    data = {"budgets": bench.budgets, "runs": runs, "dense": dense}
    return measured(bench.facts(seeds=request.seeds), tables, claims, data)


def _blocks_alone(bench: LanguageBench, seed: int) -> list[float]:
    model, path = bench.decomposed(), bench.ledger.directory / f"training-{seed}"
    with taped(bench.base, model) as objective:
        options: dict[str, Any] = {"seed": seed, "objective": objective, "teacher_cache": 0}
        bench.train_(model, bench.profiles[::-1], bench.steps, path, **options)
    return bench.nats_by_budget(model)


class BlockObjective:
    """Mean over blocks of ‖h − h*‖² / ‖h*‖² of their outputs h and the base model's h*; logits are not read."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []  # of the base model's blocks, in its last forward
        self.targets: list[Tensor] = []  # their outputs
        self.outputs: list[Tensor] = []  # of the student's blocks, on the same inputs

    def target(self, output: Any, batch: Batch) -> Tensor:
        """The base model's block outputs, (blocks, B, T, d); its forward was the last."""
        del output, batch
        return torch.stack(self.targets).detach()

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        del output, batch
        pairs = [(own.float(), wanted.float()) for own, wanted in zip(self.outputs, target, strict=True)]
        return torch.stack([(own - to).square().sum() / to.square().sum() for own, to in pairs]).mean()

    def __repr__(self) -> str:
        return "BlockObjective()"


@contextlib.contextmanager
def taped(teacher: nn.Module, student: nn.Module) -> Iterator[BlockObjective]:
    """Within it the student's blocks read what the teacher's read last; yields the objective of training each alone."""
    names = [name for name, _ in block_stack(student, nested_layers(student))]
    if not names:
        raise FlexrankError(f"{type(student).__name__} has no stack of blocks to train one by one")
    tape = BlockObjective()

    def record(inputs: Tensor, output: Any) -> None:
        if len(tape.inputs) == len(names):
            tape.inputs.clear()
            tape.targets.clear()
        tape.inputs.append(inputs.detach())
        tape.targets.append(_first(output).detach())

    def feed(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if place == 0:
            tape.outputs.clear()
        if args:
            return (tape.inputs[place], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": tape.inputs[place]}

    with Hooks() as hooks:
        for place, name in enumerate(names):
            own = student.get_submodule(name)
            hooks.watch(teacher.get_submodule(name), record)
            hooks.add(own.register_forward_pre_hook(lambda _m, a, k, place=place: feed(place, a, k), with_kwargs=True))
            hooks.watch(own, lambda _, output: tape.outputs.append(_first(output)))
        yield tape


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _claim(
    budgets: Sequence[float], untrained: Sequence[float], alone: Any, together: Any, dense: float
) -> dict[str, Any]:
    """What each way wins back of the loss above the original's, where a profile loses more than a thousandth of it."""
    parts, better = [], []
    for place, (budget, least) in enumerate(zip(budgets, untrained, strict=True)):
        if least > dense * 1.001:
            own, whole = ([1 - (one[place] - dense) / (least - dense) for one in runs] for runs in (alone, together))
            parts.append(f"{budget:g} {between(own, '.0%')} and {between(whole, '.0%')}")
            better.append(min(whole) > max(own))
    what = "training each block alone wins back less than training end to end, at every budget and seed"
    here = f"of the loss above the original's is won back, alone and end to end: {', '.join(parts)}"
    return claim(what, "independent layer training stays persistently poor", here, all(better), "not known")


def draw(data: Mapping[str, Any]) -> Any:
    """Nats per token against budget: untrained, each block alone, end to end."""
    figure, axes = nats_panel()
    for (name, runs), colour in zip(data["runs"].items(), (NEUTRAL, OTHER, OURS), strict=True):
        draw_seeds(axes, data["budgets"], runs, colour, name)
    draw_level(axes, data["dense"], "original")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    "layerwise", "Each block trained alone, and all end to end",
    "what training each block alone wins back, against end-to-end consolidation with as many steps",
    minutes=6, full_minutes=60, run=run, draw=draw, seeds=(3, 3), settings=stories_settings,
    paper="independent layer training is ineffective (Fig. 6b)",
)  # fmt: skip
