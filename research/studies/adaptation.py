"""LoRA by peft on deployed submodels, on a second text domain (FlexRank, Table 1)."""

import copy
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank import FlexrankError, collect_rows, deploy, load_elastic, nested_layers, save_elastic
from flexrank.data.batches import Batch, model_device, to_device
from flexrank.data.metrics import nats_per_token
from flexrank.data.text import read_texts, token_blocks
from flexrank.distill.schedule import scheduled_rate
from flexrank.nn.alignment import ERROR_MULTIPLE, SLACK_STEPS
from flexrank.nn.matrix import is_conv1d
from flexrank.progress import track
from flexrank.run.directory import identity
from research.assets import assets_directory
from research.experiment import Experiment, Ledger, Request
from research.figures import OURS, draw_bars, panels
from research.result import Result, between, claim, measured, spread, table
from research.studies.language import TRAINED, LanguageBench, identity_of, pycode_settings

#: Held-out blocks of the second domain, and optimiser steps of the adapters.
HELD_OUT, STEPS, FULL_STEPS = 48, 60, 600
RANK, ALPHA, LEARNING_RATE = 8, 16, 2e-3
SECOND_DOMAIN = ("text", "wikitext2_valid.txt")
#: The base model, and the size of budget 1, which consolidation leaves as the base model is.
BASE, FULL = "base", "1"


def run(request: Request) -> Result:
    """Runs the study; a seed draws the adapters' initial weights and the order of their batches."""
    import peft  # noqa: F401  # without it the study would train in vain

    domain = request.domain or assets_directory(SECOND_DOMAIN[0]).joinpath(*SECOND_DOMAIN)
    texts, bench = read_texts(domain, "\0"), LanguageBench(request)
    steps = FULL_STEPS if request.full else STEPS
    adapters = {"steps": steps, "held_out": HELD_OUT, "rank": RANK, "alpha": ALPHA, "learning_rate": LEARNING_RATE}
    slack = {"slack": bench.config.deployment.slack, "slack_steps": SLACK_STEPS, "multiple": ERROR_MULTIPLE}
    key = {"adapters": adapters, "deployed": {"dtype": str(bench.space.deployed_dtype), **slack}}
    ledger = Ledger(request.work, identity_of(bench.config, TRAINED) | {"domain": identity(domain)} | key)
    trial = _Trial(bench, ledger, *_domain_blocks(bench, texts, str(domain)), steps)
    sizes = {BASE if at is None else f"{at:g}": trial.measure(at, request.seeds) for at in (None, *bench.budgets)}
    adapter = {"adapter_rank": RANK, "adapter_steps": steps, "adapter_learning_rate": LEARNING_RATE}
    facts = bench.facts(domain=domain.name, seeds=request.seeds, **adapter)
    columns = ["size", "parameters", "adapters", "own domain", "before", "after"]
    rows = [
        [size, one["parameters"], one["trained"], one["own"], one["nats"], spread(one["after"])]
        for size, one in sizes.items()
    ]
    title = f"Held-out nats per token on {domain.name} before and after {steps} steps of LoRA: {bench.config.name}"
    data = {"sizes": sizes, "domain": domain.stem}
    return measured(facts, [table(title, columns, rows)], _claims(sizes), data)


def _domain_blocks(bench: LanguageBench, texts: Sequence[str], name: str) -> tuple[list[Batch], list[Batch]]:
    """Returns training batches and held-out ones, which are the last.

    Blocks are half as long as configured, so a megabyte of text is enough.
    """
    data = bench.config.data
    batches = token_blocks(bench.space.tokenizer, texts, data.max_tokens // 2, data.batch_size)
    apart = -(-HELD_OUT // data.batch_size)
    if len(batches) < 2 * apart:
        raise FlexrankError(f"{name}: {len(batches)} batches of the second domain are too few; at least {2 * apart}")
    return list(batches[:-apart]), list(batches[-apart:])


@dataclasses.dataclass(frozen=True)
class _Trial:
    """The base model and the submodels, before and after their adapters are trained on the second domain."""

    bench: LanguageBench
    ledger: Ledger
    training: Sequence[Batch]
    held_out: Sequence[Batch]
    steps: int

    def measure(self, budget: float | None, seeds: int) -> dict[str, Any]:
        name = BASE if budget is None else f"{budget:g}"
        before = self.ledger.take(f"{name}, before", self.before, budget)
        after = self.ledger.take_seeds(name, seeds, self.after, budget)
        return before | {"after": [one["nats"] for one in after], "trained": after[0]["trained"]}

    def before(self, budget: float | None) -> dict[str, Any]:
        model = self.submodel(budget)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return {"nats": nats_per_token(model, self.held_out), "own": self.bench.nats(model), "parameters": parameters}

    def after(self, budget: float | None, seed: int) -> dict[str, Any]:
        model = adapted(self.submodel(budget), seed)
        train_adapters_(model, self.training, self.steps, seed, self.bench.autocast)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return {"nats": nats_per_token(model, self.held_out), "trained": trained}

    def submodel(self, budget: float | None) -> nn.Module:
        """Returns the base model, or the deployed submodel of a budget."""
        space = self.bench.space
        if budget is None:
            return copy.deepcopy(space.base)
        profile, slack = self.bench.chain.at(budget), space.config.deployment.slack
        return deploy(self.elastic, profile, dtype=space.deployed_dtype, slack=slack, activations=self.rows)

    @functools.cached_property
    def rows(self) -> dict[str, Tensor]:
        """The inputs of each layer, on which slack is chosen."""
        return collect_rows(self.elastic, self.bench.space.samples.calibration, nested_layers(self.elastic))

    @functools.cached_property
    def elastic(self) -> nn.Module:
        """The consolidated model, which is trained only once."""
        bench, directory = self.bench, self.ledger.directory / "elastic"
        if not directory.is_dir():
            model = bench.trained(bench.profiles[::-1], steps=bench.steps, seed=0, name="training")
            save_elastic(model, bench.chain, directory)
        return load_elastic(directory)[0].to(bench.space.device)


def adapted(model: Any, seed: int) -> Any:
    """Returns the model, frozen, with LoRA on the linear layers of its blocks, on both factors of a factorised one."""
    import peft

    torch.manual_seed(seed)
    # A submodel's head may be factorised, and the base model's is not: both are adapted inside their blocks only.
    head = {id(module) for module in model.get_output_embeddings().modules()}
    names = [
        name for name, module in model.named_modules()
        if (type(module) is nn.Linear or is_conv1d(module)) and id(module) not in head
    ]  # fmt: skip
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def train_adapters_(
    model: nn.Module, batches: Sequence[Batch], steps: int, seed: int, autocast: torch.dtype | None
) -> None:
    """Trains what requires gradients on next-token cross entropy: AdamW, a tenth of the steps as warm-up, cosine."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, weight_decay=0.0)
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)).tolist()
    device = model_device(model)
    for step in track(range(steps), "adapting"):
        optimizer.param_groups[0]["lr"] = scheduled_rate(step, steps, LEARNING_RATE, max(1, steps // 10))
        batch: Any = to_device(batches[order[step % len(order)]], device)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            logits = model(**batch).logits[:, :-1]
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    model.eval()


def _claims(sizes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    after, claims = {name: one["after"] for name, one in sizes.items()}, []
    largest = next((name for name in after if name not in (BASE, FULL)), None)
    if largest is not None:
        over = [own / base - 1 for own, base in zip(after[largest], after[BASE], strict=True)]
        claims.append(claim(
            f"the largest trained size, {largest}, adapts as the base: its loss afterwards is within 2 % of the base's",
            "25.0 against 25.7 % accuracy at 1 (math, 1B)", f"over it {between(over, '+.2%')}",
            max(map(abs, over)) <= 0.02,
        ))  # fmt: skip
    won = {name: [1 - math.exp(value - one["nats"]) for value in one["after"]] for name, one in sizes.items()}
    stuck = [name for name, gains in won.items() if min(gains) <= 0]
    claims.append(claim(
        "every submodel adapts, and the larger the better, every seed",
        "20.5, 15.7, 13.6 % accuracy at .8, .6, .4 (math, 1B)",
        ", ".join(f"{n} {between(after[n], '.3f')}, perplexity −{between(won[n], '.0%')}" for n in sizes),
        _rises([values for name, values in after.items() if name != BASE]) and not stuck,
        f"the loss did not fall at {', '.join(stuck)}" if stuck else "dense layers have one adapter, factorised two",
    ))  # fmt: skip
    return claims


def _rises(by_size: Sequence[Sequence[float]]) -> bool:
    """Whether each size's loss is above that of the size before for every seed; all sizes see the same batches."""
    return all(small < large for pair in itertools.pairwise(by_size) for small, large in zip(*pair, strict=True))


def draw(data: Mapping[str, Any]) -> Any:
    """Draws the loss on the second domain by size, before and after adaptation, with its range over seeds."""
    figure, (axes,) = panels(size=(5.6, 3.6))
    sizes = data["sizes"]
    after = [one["after"] for one in sizes.values()]
    bars = {"before": [one["nats"] for one in sizes.values()], "after LoRA": list(map(statistics.fmean, after))}
    draw_bars(axes, list(sizes), bars, ("#bbbbbb", OURS))
    for place, values in enumerate(after):
        axes.vlines(place + 0.2, min(values), max(values), "black", linewidth=1)
    axes.set(xlabel="size", ylabel=f"nats per token on {data['domain']}")
    axes.legend(ncols=2, loc="upper left", bbox_to_anchor=(0, 1.12))
    return figure


EXPERIMENT = Experiment(
    name="adaptation", title="LoRA on deployed submodels",
    shows="the loss on a second text domain before and after LoRA, by size, beside the base model adapted alike",
    paper="the full size adapts as the base; smaller sizes degrade gracefully (Table 1)",
    minutes=25, full_minutes=90, seeds=(3, 3), run=run, draw=draw,
    settings=lambda full: pycode_settings(
        allocation={"budgets": [0.9, 0.8, 0.6, 0.4]}, distillation={"steps": 1500 if full else 120},
        deployment={"slack": "auto"},
    ),
)  # fmt: skip
