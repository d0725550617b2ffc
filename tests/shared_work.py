"""What several processes do together, to be compared with one: torchrun runs this file, and test_processes calls it.

    torchrun --nproc-per-node N tests/shared_work.py PLACE

Batches and rows do not divide evenly: with four processes some have no batch, and no row of one.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

import flexrank as fr
from flexrank import processes
from flexrank.calibrate import moments_by_block
from flexrank.data.stream import StreamedBatches, block_maker, open_texts
from flexrank.errors import FlexrankError
from flexrank.files import digest_tensor
from flexrank.nn.gather import gathered, scatter_sum
from flexrank.nn.select import select_layers
from flexrank.nn.sharding import shard_, shard_blocks_
from flexrank.nn.switch import full_profile, nested_layers
from flexrank.refit import refit_
from shared_models import RoutedBlocks, images, routed, texts, vectors
from tiny import WordTokenizer, build, chain_of, nest

STEPS, STOP = 4, 2
#: Checkpoints of trainings that one process and four have stopped, and whether they resume sharded.
RESUMED = (("of-1", False), ("of-1", True), ("sharded-4", True))


def routed_by_block(_: Path) -> dict[str, Tensor]:
    """The first batch reaches both experts, and each other batch one of them."""
    model, data = RoutedBlocks(), vectors(4, 7)
    for number, batch in enumerate(data[1:]):
        batch[:, 0] = (-1.0) ** number
    found = {}
    parts = list(moments_by_block(model, data, select_layers(model)))
    assert len(parts) == 2
    for part in parts:
        found |= {name: one.moment for name, one in part.items()}
    return found


def calibrated_in_parts(_: Path) -> dict[str, Tensor]:
    """By a model whose blocks FSDP2 holds in parts, so all processes have to run them; a batch for each of four."""
    model = build("llama_untied")
    layers = select_layers(model)
    shard_blocks_(model, layers)
    parts = moments_by_block(model, texts(4), layers)
    return {name: one.moment for part in parts for name, one in part.items()}


def calibrated(_: Path) -> dict[str, Tensor]:
    model = build("bert")
    moments = fr.collect_moments(
        model, texts(3), select_layers(model), gradient_loss=fr.EmbeddingObjective().fisher_loss
    )
    found = {f"{name}.moment": one.moment for name, one in moments.items()}
    found |= {f"{name}.gradient": one.gradient_moment for name, one in moments.items()}
    return found | {f"{name}.sums": torch.tensor([one.tokens, one.mean_square]) for name, one in moments.items()}


def decomposed(place: Path) -> dict[str, Tensor]:
    """By block, with and without gradients, and in one pass; the rises of curvature are of each layer's own process."""
    found = {}
    for name, method in (("llama_untied", "fisher"), ("gpt2", "datasvd"), ("convnet", "datasvd")):
        model, directory = build(name), place / f"{name}-{processes.count()}"
        data: Any = images(3, 2)
        layers, seen = select_layers(model), dict[str, Tensor]()
        loss = fr.LogitObjective().fisher_loss if method == "fisher" else None
        for layer in layers:
            seen[layer] = torch.zeros(1)
        if name == "convnet":
            fr.decompose_(model, fr.collect_moments(model, data, layers))
        else:
            fr.decompose_to_disk(
                model, texts(3), list(layers), directory, method=method, gradient_loss=loss,
                on_layer=lambda layer, _, moment, seen=seen: seen[layer].add_(moment.tokens),
            )  # fmt: skip
            processes.on_first_process(lambda: None)
            model = fr.load_elastic(directory)[0]
            processes.sum_(seen.values())
            found |= {f"{name}.{layer}.seen": tokens for layer, tokens in seen.items()}
        for layer, nested in nested_layers(model).items():
            found |= {f"{name}.{layer}.u": nested.u.detach(), f"{name}.{layer}.v": nested.v.detach()}
    return found


def probed(place: Path) -> dict[str, Tensor]:
    student, teacher = nest(build("llama_tied")), build("llama_tied")
    evaluate, calls = fr.distillation_evaluator(teacher, texts(3)), []

    def counted(model: nn.Module) -> float:
        calls.append(0)
        return evaluate(model)

    checkpoint = place / f"probe-{processes.count()}.json"
    table = fr.probe_sensitivity(student, counted, 5, checkpoint=checkpoint)
    processes.on_first_process(lambda: None)
    kept = json.loads(checkpoint.read_text())["errors"]
    assert kept == {name: list(errors) for name, errors in table.errors.items()}
    return {name: torch.tensor(errors) for name, errors in table.errors.items()}


def consolidated(_: Path) -> dict[str, Tensor]:
    """Losses by each objective, and the weights."""
    cases: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
        "llama_untied": ("language", texts(4), fr.LogitObjective(hidden_weight=2.0, top_k=9), {"accumulation": 2}),
        "bert": ("embedding", texts(3), fr.EmbeddingObjective(4.0), {"max_norm": 0.05}),
        "perceptron": ("features", vectors(3, 7), fr.FeatureObjective(), {"method": "paper"}),
        "phi3": ("language", texts(3, 1), None, {}),
    }
    found = {}
    for name, (_task, batches, objective, options) in cases.items():
        student, teacher = nest(build(name)), build(name)
        for model in (student, teacher) if name == "llama_untied" else ():
            model.config.output_hidden_states = True
        history = fr.distill_(
            student, teacher, batches, chain_of(student, (0.3, 0.6)), objective=objective, steps=STEPS,
            learning_rate=1e-3, **options,
        )  # fmt: skip
        found |= {f"{name}.losses": torch.tensor(history.losses), f"{name}.factors": _factors(student)}
    student, teacher, batches = routed()
    history = fr.distill_(student, teacher, batches, chain_of(student, (0.3, 0.6)), steps=STEPS, learning_rate=1e-2)
    return found | {"routed.losses": torch.tensor(history.losses), "routed.factors": _factors(student)}


def _factors(model: nn.Module) -> Tensor:
    return torch.cat([one.u.detach().flatten() for one in nested_layers(model).values()])


def sharded(place: Path) -> dict[str, Tensor]:
    """As `consolidated`, with models of which each process holds a part; what is written, too."""
    llama = {"accumulation": 2, "weight_decay": 0.3, "train_embeddings": True}
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama_untied": (texts(4), fr.LogitObjective(hidden_weight=2.0, top_k=9), llama),
        "bert": (texts(3), fr.EmbeddingObjective(4.0), {"max_norm": 0.05, "gradient_checkpointing": True}),
        "perceptron": (vectors(3, 7), fr.FeatureObjective(), {"method": "paper"}),
        "convnet": (images(3, 5), fr.LogitObjective(), {}),
    }
    found = {}
    for name, (batches, objective, options) in cases.items():
        student, teacher = nest(build(name)), build(name)
        for model in (student, teacher) if name == "llama_untied" else ():
            model.config.output_hidden_states = True
        # At full size the first loss is rounding, and so is AdamW's step of whatever is trained at that size.
        budgets = (0.3, 0.6) if name == "perceptron" else (0.3, 0.6, 1.0)
        chain, layers = chain_of(student, budgets), list(nested_layers(student))
        shard_(student)
        if name in ("llama_untied", "bert"):
            shard_blocks_(teacher, layers)
        evaluate = fr.distillation_evaluator(teacher, batches, objective)
        history = fr.distill_(
            student, teacher, batches, chain, objective=objective, steps=STEPS, learning_rate=1e-3, **options
        )
        found[f"{name}.losses"] = torch.tensor(history.losses)
        with fr.use_profile(student, chain.at(0.6)):
            found[f"{name}.evaluated"] = torch.tensor(evaluate(student))
        fr.save_elastic(student, chain, artefact := place / f"{name}-sharded-{processes.count()}")
        processes.on_first_process(lambda: None)
        written = load_file(artefact / "elastic.safetensors")
        found |= {f"{name}.{key}": written[key] for key in written if key.endswith((".u", ".v", ".dense"))}
        numbers = fr.inspect_artefact(artefact)["parameters"]
        assert name == "convnet" or numbers == sum(one.numel() for one in written.values())  # which has buffers
    return found


def of_one_size(place: Path) -> dict[str, Tensor]:
    """Sharded, in bfloat16: one size, whose biases and norms are trained too; returns what is whole in all processes.

    The teacher's outputs fit its cache in part. The chain goes on above the trained size, where the artefact ends.
    Of the perceptron's six outputs four processes have two, two, two and none.
    """
    found = {}
    for name, batches in (("bert", texts(3)), ("perceptron", [one.bfloat16() for one in vectors(3, 7)])):
        student, teacher = nest(build(name).bfloat16()), build(name).bfloat16()
        chain, layers = chain_of(student, (0.5, 0.8)), list(nested_layers(student))
        shard_(student)
        if name == "bert":
            shard_blocks_(teacher, layers)
        profiles = [chain.at(0.5)]
        fr.distill_(student, teacher, batches, profiles, steps=STEPS, learning_rate=1e-3, teacher_cache=2560)
        fr.save_elastic(student, chain, place / f"one-size-{name}-{processes.count()}")
        found |= {f"{name}.{key}": one for key, one in student.named_parameters() if not key.endswith((".u", ".v"))}
    return {key: one.detach() for key, one in found.items()}


def streamed(place: Path) -> list[list[int]]:
    """The tokens of all batches of a stream's pass, of three windows, each of three pieces and a part of one."""
    if processes.is_first():
        (place / "lines.txt").write_text("\n".join(f"line {n} has w{n % 7}" for n in range(600)))
    processes.on_first_process(lambda: None)
    stream = open_texts("text", str(place / "lines.txt"), WordTokenizer())
    return [
        batch["input_ids"].flatten().tolist()
        for batch in StreamedBatches(stream, block_maker(WordTokenizer(), 8, 4, 0), 200)
    ]


class Stopping(fr.FeatureObjective):
    """Has the last process get a SIGTERM in one of its steps."""

    def __init__(self, step: int) -> None:
        self.__dict__.update(left=step)

    def target(self, output: Any, batch: Any) -> Tensor:
        self.__dict__["left"] -= 1
        if not self.left and processes.number() == processes.count() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().target(output, batch)

    __repr__ = fr.FeatureObjective.__repr__


def shuffled(batches: list[Tensor]) -> StatefulDataLoader[Tensor]:
    return StatefulDataLoader(batches, batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(3))


def trained(checkpoint: Path | None, stop: int = 0, is_sharded: bool = False) -> list[float]:
    """The losses of all steps, or those that a checkpoint holds after a stop in one of them."""
    student, teacher = nest(build("perceptron")), build("perceptron")
    chain = chain_of(student, (0.3, 0.6))
    if is_sharded:
        shard_(student)
    try:
        history = fr.distill_(
            student, teacher, shuffled(vectors(4, 7)), chain, objective=Stopping(stop), steps=STEPS,
            learning_rate=1e-2, checkpoint=checkpoint,
        )  # fmt: skip
    except KeyboardInterrupt:
        assert checkpoint is not None
        return json.loads((checkpoint / "state.json").read_text())["losses"]
    return list(history.losses)


class Plain:
    """An objective without terms."""

    target, loss = fr.FeatureObjective().target, fr.FeatureObjective().loss


def said(work: Callable[[], object]) -> str:
    try:
        work()
    except FlexrankError as error:
        return str(error)
    return ""


def refused(student: nn.Module, teacher: nn.Module, batches: list[Tensor], objective: Any, **options: int) -> str:
    chain = chain_of(student, (0.5,))
    return said(lambda: fr.distill_(student, teacher, batches, chain, objective=objective, steps=1, **options))


def refusals(count: int, number: int) -> list[str]:
    """What is said of an objective, batches, models and values that several processes cannot share."""
    student, teacher, objective = nest(build("perceptron")), build("perceptron"), fr.FeatureObjective()
    parted, whole_routed, batches = routed()
    shard_(parted)
    own, layers = vectors(count, 7)[number : number + 1], select_layers(teacher)
    # A row for each process. In two batches of a step process 0 reaches one expert, then the other; the others do too,
    # in the other order.
    crossed = vectors(2, count)
    for sign, batch in zip((1.0, -1.0), crossed, strict=True):
        batch[:, 0] = torch.tensor([sign] + [-sign] * (count - 1))
    return [
        refused(student, teacher, vectors(1, 7), Plain()),
        refused(student, teacher, own, objective),
        refused(parted, whole_routed, batches, objective),
        refused(parted, whole_routed, crossed, objective, accumulation=2),
        said(lambda: fr.collect_moments(teacher, own, layers)),
        said(lambda: list(moments_by_block(teacher, own, layers))),
        said(lambda: fr.collect_moments(teacher, vectors(2 + (number == 0), 7), layers)),
        said(lambda: list(moments_by_block(teacher, vectors(2 + (number == 0), 7), layers))),
        said(lambda: fr.probe_sensitivity(student, fr.distillation_evaluator(teacher, own))),
        said(lambda: fr.probe_sensitivity(parted, lambda _: 1.0)),
        said(lambda: refit_(parted, full_profile(parted), whole_routed, batches)),
    ]


WORK: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "calibrated": calibrated, "decomposed": decomposed, "probed": probed, "consolidated": consolidated,
    "sharded": sharded, "routed": routed_by_block,
    "in parts": calibrated_in_parts,
}  # fmt: skip


def all_work(place: Path) -> dict[str, Tensor]:
    """The tensors of all kinds of work, by kind and name."""
    return {f"{kind}/{key}": value for kind, work in WORK.items() for key, value in work(place).items()}


def main(place: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with processes.joined():
        count, number = processes.count(), processes.number()
        tensors = {key: value.contiguous().clone() for key, value in all_work(place).items()}
        whole = of_one_size(place)
        facts: dict[str, Any] = {
            "refused": refusals(count, number),
            "resumed": [],
            "whole": {k: digest_tensor(v) for k, v in whole.items()},
        }
        facts["stopped"] = [
            trained(place / f"of-{count}", STOP), trained(place / f"sharded-{count}", STOP, is_sharded=True)
        ]  # fmt: skip
        processes.on_first_process(lambda: None)
        for name, is_sharded in RESUMED:
            again = place / f"{name}-{is_sharded}"
            processes.on_first_process(lambda name=name, again=again: str(shutil.copytree(place / name, again)))
            facts["resumed"].append(trained(again, is_sharded=is_sharded))
        trained(own := place / f"own-{count}-{number}")
        facts["writes"] = own.exists()
        small = torch.tensor([256.0 if number == 0 else 1.0], dtype=torch.bfloat16)
        processes.sum_([small, small[:0]])
        facts["sum"] = small.item()
        processes.sum_([large := torch.tensor([2**40 + 1])])
        facts["large"] = large.item()
        half = torch.full((2, 3 * count - 1), 256.0 if number == 0 else 1.0, dtype=torch.bfloat16)
        parts = [gathered(half[:, :3], 1, 3 * count - 1), scatter_sum(half, 1)]
        facts["parts"] = [[part.shape[1], part[0].tolist()] for part in parts]
        facts["first"] = processes.on_first_process(lambda: [processes.count(), processes.number(), os.getpid()])
        facts["merged"] = processes.gather_merged({number: [number], number + count: None})
        facts["any"] = [processes.any_process(number == count - 1), processes.any_process(False)]
        facts["same"] = [processes.same_everywhere("one"), processes.same_everywhere(number)]
        facts["pid"], facts["streamed"] = os.getpid(), streamed(place)
        save_file(tensors, place / f"{count}-{number}.safetensors")
    facts["restored"] = signal.getsignal(signal.SIGTERM) is before
    with processes.joined():  # again, with the same store of torchrun
        facts["again"] = [
            processes.on_first_process(lambda: "second"),
            processes.gather_merged({number: [number], number + count: None}),
        ]
        (place / f"{count}-{number}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
