"""Independent training of each block against end-to-end consolidation (FlexRank, Fig. 6b).

Layerwise, every block of the student reads what the original's block reads and is held to what that gives out, so that
it adapts to its own nonlinearity alone: no gradient crosses a block, and no block sees another's error. What stands
outside the blocks, an untied head, is not trained so.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.calibrate import block_stack
from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError
from flexrank.nn.switch import nested_layers
from research.findings import Result, between, claim, spread, table
from research.findings.figures import NEUTRAL, OTHER, OURS, draw_seeds
from research.studies.language import LanguageBench, stories_settings
from research.studies.study import Ledger, Request, Study, count_seeds

ROWS = ("DataSVD, untrained", "each block alone", "end to end")


def run(request: Request) -> Result:
    """Runs the study: both trainings get the configured steps."""
    seeds, bench = count_seeds(request, 3, 3), LanguageBench(request)
    ledger = Ledger(request.work, bench.key())
    alone = [
        ledger.take(f"blocks alone, seed {seed}", functools.partial(_blocks_alone, bench, ledger, seed))
        for seed in range(seeds)
    ]
    together = [bench.consolidated(seed, request.work.parent) for seed in range(seeds)]
    untrained = ledger.take("untrained", lambda: bench.nats_by_budget(bench.decomposed()))
    dense = ledger.take("dense", lambda: bench.nats(bench.base))
    found = {ROWS[0]: [untrained], ROWS[1]: alone, ROWS[2]: together}
    rows = [[name, *map(spread, zip(*runs, strict=True))] for name, runs in found.items()]
    steps = bench.config.distillation.steps
    title = f"Held-out nats per token by budget: {bench.config.name}, {steps} steps each (original {dense:.3f})"
    return {
        "settings": bench.facts() | {"seeds": seeds},
        "tables": [table(title, ["", *(f"{budget:g}" for budget in bench.budgets)], rows)],
        "claims": _claims(bench.budgets, untrained, alone, together, dense),
        "data": {"budgets": bench.budgets, "found": found, "dense": dense},
    }


def _blocks_alone(bench: LanguageBench, ledger: Ledger, seed: int) -> list[float]:
    model, path = bench.decomposed(), ledger.directory / f"training-{seed}"
    with taped(bench.base, model) as objective:
        bench.train_(model, bench.profiles[::-1], steps=bench.config.distillation.steps, seed=seed, checkpoint=path,
                     objective=objective, teacher_cache=0)  # fmt: skip
    return bench.nats_by_budget(model)


@dataclasses.dataclass(repr=False)
class BlockObjective:
    """Mean over blocks of the relative squared error ‖h − h*‖² / ‖h*‖² of their outputs; the model's own is not read.

    Attributes:
        inputs: of the original's blocks, in the forward last made.
        wanted: their outputs.
        found: the student's blocks' outputs on the same inputs.
    """

    inputs: list[Tensor] = dataclasses.field(default_factory=list)
    wanted: list[Tensor] = dataclasses.field(default_factory=list)
    found: list[Tensor] = dataclasses.field(default_factory=list)

    def target(self, output: Any, batch: Batch) -> Tensor:
        """The original's block outputs, (blocks, B, T, d); its forward was the last."""
        del output, batch
        return torch.stack(self.wanted).detach()

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        del output, batch
        errors = [
            (found.float() - wanted.float()).square().sum() / wanted.float().square().sum()
            for found, wanted in zip(self.found, target, strict=True)
        ]
        return torch.stack(errors).mean()

    def fisher_loss(self, output: Any, batch: Batch) -> Tensor:
        """Not defined: blocks are trained, not calibrated, by this objective."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "BlockObjective()"


@contextlib.contextmanager
def taped(teacher: nn.Module, student: nn.Module) -> Iterator[BlockObjective]:
    """The objective of training each block alone; inside the block, student's blocks read what the teacher's read last.

    Raises:
        FlexrankError: the student is no stack of blocks.
    """
    names = [name for name, _ in block_stack(student, nested_layers(student))]
    if not names:
        raise FlexrankError(f"{type(student).__name__} has no stack of blocks to train one by one")
    tape = BlockObjective()

    def start(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(tape.inputs) == len(names):
            tape.inputs.clear()
            tape.wanted.clear()
        tape.inputs.append(_hidden(args, kwargs).detach())

    def feed(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if place == 0:
            tape.found.clear()
        if args:
            return (tape.inputs[place], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": tape.inputs[place]}

    handles = []
    for place, name in enumerate(names):
        original, own = teacher.get_submodule(name), student.get_submodule(name)
        handles += [
            original.register_forward_pre_hook(start, with_kwargs=True),
            original.register_forward_hook(lambda _m, _a, output: tape.wanted.append(_first(output).detach())),
            own.register_forward_pre_hook(lambda _m, a, k, place=place: feed(place, a, k), with_kwargs=True),
            own.register_forward_hook(lambda _m, _a, output: tape.found.append(_first(output))),
        ]
    try:
        yield tape
    finally:
        for handle in handles:
            handle.remove()


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _claims(
    budgets: Sequence[float],
    untrained: Sequence[float],
    alone: Sequence[Sequence[float]],
    together: Sequence[Sequence[float]],
    dense: float,
) -> list[dict[str, Any]]:
    """What each way wins back of the loss above the original's, where a profile loses more than a thousandth of it."""
    told, better = [], []
    for place, (budget, least) in enumerate(zip(budgets, untrained, strict=True)):
        if least <= dense * 1.001:
            continue
        won = [[1 - (one[place] - dense) / (least - dense) for one in runs] for runs in (alone, together)]
        told.append(f"{budget:g} {between(won[0], '.0%')} and {between(won[1], '.0%')}")
        better.append(min(won[1]) > max(won[0]))
    return [
        claim(
            "training each block alone wins back less than training end to end, at every budget and seed",
            "independent layer training stays persistently poor",
            f"of the loss above the original's is won back, alone and end to end: {', '.join(told)}",
            all(better),
            "" if all(better) else "not found out",
        )
    ]


def draw(data: Mapping[str, Any]) -> Any:
    """Nats per token against budget: untrained, each block alone, end to end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for (name, runs), colour in zip(data["found"].items(), (NEUTRAL, OTHER, OURS), strict=True):
        draw_seeds(axes, data["budgets"], runs, colour, name)
    axes.axhline(data["dense"], color="#888888", linewidth=1, linestyle=":", label="original")
    axes.set(xlabel="budget", ylabel="held-out nats per token")
    axes.legend(frameon=False)
    return figure


STUDY = Study(
    name="layerwise",
    title="Each block trained alone, and all end to end",
    shows="what training each block alone wins back, against end-to-end consolidation with as many steps",
    paper="independent layer training is ineffective (Fig. 6b)",
    minutes=6,
    full_minutes=60,
    run=run,
    draw=draw,
    takes_model=True,
    settings=lambda full: stories_settings(distillation={"steps": 3000 if full else 300}),
)
