"""A small vision transformer and ResNet-20 on CIFAR-10 at every size (FlexRank, figure of section 5.2, bottom).

For each network and seed: DataSVD on some training images, sensitivities on others, one joint chain of ranks, and
consolidation on the rest, by distillation alone; labels are never used. No stage sees a test image.
"""

import contextlib
import copy
import dataclasses
import functools
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flexrank.deployment.environment import assets_directory
from torch import Tensor, nn

from flexrank.allocate import allocate_ranks
from flexrank.calibrate import collect_moments
from flexrank.data.images import AlteredBatches, Scaling
from flexrank.data.metrics import accuracy
from flexrank.decompose import decompose_
from flexrank.distill import distill_, distillation_evaluator
from flexrank.distill.objectives import LogitObjective
from flexrank.files import digest_file, read_json
from flexrank.hf.models import eager_attention, load_model
from flexrank.nn.linalg import leading_count
from flexrank.nn.select import select_layers
from flexrank.nn.switch import use_profile
from flexrank.probe import probe_sensitivity
from flexrank.profiles import ProfileChain
from flexrank.progress import track
from flexrank.run.stages import autocast_dtype
from research.findings import Result, between, claim, shown, spread, table
from research.studies import resnet, vit
from research.studies.study import Ledger, Request, Study, count_seeds

#: Beside the study's own directory, where a training by examples/train_vit.py may have left it.
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
VIT_DIRECTORY = "vit-cifar10"
RESNET_FILE = "cifar10_resnet20/resnet20_jpg_ft.safetensors"
OBJECTIVE = LogitObjective()
#: Points of accuracy; the claim's margin, and the budget that it is made for.
MARGIN, SMALL = 5.0, 0.3
ENERGY = 0.99
#: The first budget after 20 % of the parameters are gone.
EARLY = 0.7


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much of everything one seed takes.

    Attributes:
        steps: of consolidation.
        batch_size: images of a step.
        calibration: images for the moments.
        probe: other images, which each probe is measured on.
        levels: ranks probed for each layer.
        warmup_steps: of consolidation.
        test: how many of the test images are classified, the first ones; None for all.
    """

    steps: int
    batch_size: int = 64
    calibration: int = 512
    probe: int = 256
    levels: int = 10
    warmup_steps: int = 30
    test: int | None = None


QUICK = Plan(steps=500, probe=128, test=2000)
FULL = Plan(steps=6000, batch_size=128, calibration=1024, probe=512, warmup_steps=200)


@dataclasses.dataclass(frozen=True)
class Network:
    """One network to compress.

    Attributes:
        name: in the finished units.
        title: in table and figure.
        model: the full one, in eval mode.
        scaling: how it reads images.
        learning_rate: of consolidation, at its peak.
        digest: of its weights.
        in_paper: whether the paper's claims are about networks of its kind.
    """

    name: str
    title: str
    model: nn.Module
    scaling: Scaling
    learning_rate: float
    digest: str
    in_paper: bool


@dataclasses.dataclass(frozen=True)
class Images:
    """Training images and test images, uint8 (N, C, H, W), and the classes of the latter (N,)."""

    training: Tensor
    test: Tensor
    classes: Tensor


def run(request: Request) -> Result:
    """Both networks on CIFAR-10; the vision transformer is trained first where that was not done before."""
    assets = assets_directory("cifar10", RESNET_FILE)
    plan = FULL if request.full else QUICK
    seeds = count_seeds(request, quick=3, full=3)
    directory = request.work.parent / VIT_DIRECTORY
    if not (directory / vit.RECORD).is_file():
        vit.train_vit(assets / "cifar10", directory)
    weights = directory / "model.safetensors"
    networks = (
        Network(
            "vit", "vision transformer", load_model(directory, "classification"),
            Scaling.read(directory / "preprocessor_config.json"), 5e-4, digest_file(weights), True,
        ),
        Network(
            "resnet20", "ResNet-20", resnet.load_resnet20(assets / RESNET_FILE), resnet.SCALING, 1e-3,
            digest_file(assets / RESNET_FILE), False,
        ),
    )  # fmt: skip
    training, _ = vit.read_tensors(assets / "cifar10" / vit.TRAIN)
    images = Images(training, *vit.read_tensors(assets / "cifar10" / vit.TEST))
    result = compress(networks, images, plan, seeds, request)
    record = read_json(directory / vit.RECORD)
    # Not part of the finished units' key: there the digest of the weights stands for the training.
    trained = {"training_of_the_transformer": record["recipe"] | {"accuracy": record["accuracy"]}}
    return result | {"settings": result["settings"] | trained}


def compress(networks: Sequence[Network], images: Images, plan: Plan, seeds: int, request: Request) -> Result:
    """Every network with every seed: the study's result."""
    every = images
    images = dataclasses.replace(images, test=images.test[: plan.test], classes=images.classes[: plan.test])
    settings = dataclasses.asdict(plan) | {
        "networks": {one.name: {"digest": one.digest, "learning_rate": one.learning_rate} for one in networks},
        "images": [len(every.training), len(every.test)],
        "budgets": list(BUDGETS),
    }
    ledger = Ledger(request.work, settings)
    found = []
    for network in networks:
        full = ledger.take(f"{network.name}, full", functools.partial(_measure, network.model, network, images))
        whole = ledger.take(f"{network.name}, whole", functools.partial(_measure, network.model, network, every))
        trials = [_Trial(network, images, plan, seed, ledger).run() for seed in range(seeds)]
        size = sum(parameter.numel() for parameter in network.model.parameters())
        facts = {"title": network.title, "in_paper": network.in_paper, "size": size, "full": full, "whole": whole}
        found.append(facts | {key: [trial[key] for trial in trials] for key in trials[0]})
    data = {"budgets": list(BUDGETS), "networks": found, "images": len(images.test)}
    passes = plan.steps * plan.batch_size / len(images.training)
    claims = [_claim_consolidated(one, passes) for one in found] + [_claim_datasvd(one) for one in found]
    return {"settings": settings | {"seeds": seeds}, "tables": tables(data), "claims": claims, "data": data}


class _Trial:
    """One network with one seed, which draws the calibration's images, the order, the crops and the profiles."""

    def __init__(self, network: Network, images: Images, plan: Plan, seed: int, ledger: Ledger):
        self.network, self.images, self.plan, self.seed, self.ledger = network, images, plan, seed, ledger
        self.label = f"{network.name}, seed {seed}"
        order = torch.randperm(len(images.training), generator=torch.Generator().manual_seed(seed))
        self.calibration, self.probe, self.rest = order.tensor_split((plan.calibration, plan.calibration + plan.probe))

    def run(self) -> dict[str, Any]:
        chain = ProfileChain.from_json(self.ledger.take(f"{self.label}, chain", lambda: self.allocate().to_json()))
        share = self.ledger.take(f"{self.label}, energetic share", self.energetic_share)
        before = self.ledger.take(f"{self.label}, datasvd", lambda: self.accuracies(chain))
        after = self.ledger.take(f"{self.label}, consolidated", lambda: self.consolidate(chain))
        if self.checkpoint.exists():  # not where an earlier process finished the unit and removed it
            shutil.rmtree(self.checkpoint)
        sizes = [chain.model_parameters(chain.entry_at(budget)) for budget in BUDGETS]
        return {"datasvd": before, "consolidated": after, "parameters": sizes, "energetic_share": share}

    @property
    def checkpoint(self) -> Path:
        """The directory that an interrupted consolidation goes on from."""
        return self.ledger.directory / f"{self.label}, distilled"

    @property
    def model(self) -> nn.Module:
        """The elastic network."""
        return self.decomposed[0]

    @functools.cached_property
    def decomposed(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The elastic network, decomposed by the calibration's images, and its layers' energies."""
        model = copy.deepcopy(self.network.model)
        moments = collect_moments(model, self.batches(self.calibration), select_layers(model))
        return model, decompose_(model, moments)

    def energetic_share(self) -> float:
        """Share of a layer's components that hold 99 % of its output's energy, a mean over the layers."""
        found = self.decomposed[1].values()
        return statistics.fmean(leading_count(energies, ENERGY) / len(energies) for energies in found)

    def allocate(self) -> ProfileChain:
        """One nested profile for each budget."""
        evaluate = distillation_evaluator(self.network.model, self.batches(self.probe), OBJECTIVE)
        checkpoint = self.ledger.directory / f"{self.label}, probe.json"
        table = probe_sensitivity(self.model, evaluate, self.plan.levels, spacing="parameters", checkpoint=checkpoint)
        return allocate_ranks(table, BUDGETS)

    def consolidate(self, chain: ProfileChain) -> list[float]:
        """Trains all profiles together, and measures them."""
        plan, network = self.plan, self.network
        batches = AlteredBatches(self.images.training[self.rest], network.scaling, plan.batch_size, self.seed)
        with _short_attention(self.model), _short_attention(network.model):
            distill_(
                self.model, network.model, batches, chain, objective=OBJECTIVE, steps=plan.steps, seed=self.seed,
                learning_rate=network.learning_rate, warmup_steps=plan.warmup_steps, teacher_cache=0,
                autocast=autocast_dtype("auto", torch.device("cpu")),
                checkpoint=self.checkpoint,
            )  # fmt: skip
        return self.accuracies(chain)

    def accuracies(self, chain: ProfileChain) -> list[float]:
        """In percent, at each budget."""
        found = []
        for budget in track(BUDGETS, f"classifying, {self.label}"):
            with use_profile(self.model, chain.at(budget)):
                found.append(_measure(self.model, self.network, self.images))
        return found

    def batches(self, rows: Tensor) -> list[Tensor]:
        """Training images (B, C, H, W) as the network reads them."""
        return list(vit.scaled_batches(self.images.training[rows], self.network.scaling))


def _measure(model: nn.Module, network: Network, images: Images) -> float:
    """Test accuracy in percent."""
    return 100 * accuracy(model, vit.scaled_batches(images.test, network.scaling), images.classes)


def _short_attention(model: Any) -> contextlib.AbstractContextManager[None]:
    """Attention as plain products, for a transformer: 65 tokens are too few for torch's fused backward pass."""
    return eager_attention(model) if hasattr(model, "set_attn_implementation") else contextlib.nullcontext()


def tables(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Accuracies, and what the budgets are in parameters of the whole network."""
    columns = [f"{budget:.1f}" for budget in data["budgets"]]
    quality, sizes = [], []
    for one in data["networks"]:
        for key, told in (("datasvd", "DataSVD alone"), ("consolidated", "consolidated")):
            quality.append([f"{one['title']}, {told}", one["full"], *map(spread, zip(*one[key], strict=True))])
        means = [round(statistics.fmean(column)) for column in zip(*one["parameters"], strict=True)]
        sizes.append([one["title"], one["whole"], one["size"], *means])
    title = f"accuracy on the first {data['images']} test images of CIFAR-10 in %, by budget"
    return [
        table(title, ["network, stage", "full", *columns], quality, digits=2),
        table(
            "accuracy of the full networks on all test images in %, and parameters by budget",
            ["network", "accuracy", "full", *columns],
            sizes,
            digits=2,
        ),
    ]


def _lost(one: Mapping[str, Any], stage: str, budget: float) -> list[float]:
    """Points of accuracy below the full network, for each seed."""
    place = BUDGETS.index(budget)
    return [one["full"] - values[place] for values in one[stage]]


def _claim_consolidated(one: Mapping[str, Any], passes: float) -> dict[str, Any]:
    lost = _lost(one, "consolidated", SMALL)
    holds = max(lost) <= MARGIN
    return claim(
        f"{one['title']}, consolidated, at {SMALL} of the size, every seed",
        f"within {MARGIN:.0f} points of the full model" if one["in_paper"] else "transformers only",
        f"{between(lost, '.1f')} points below the full network's {one['full']:.1f} %",
        holds if one["in_paper"] else None,
        "" if holds else f"consolidation here saw the images {passes:.1f} times, the paper's about 20 times",
    )


def _claim_datasvd(one: Mapping[str, Any]) -> dict[str, Any]:
    lost = _lost(one, "datasvd", EARLY)
    holds, share = min(lost) > MARGIN, shown(spread(one["energetic_share"]), 2)
    others = ", ".join(f"{between(_lost(one, 'datasvd', budget), '.1f')} at {budget}" for budget in (0.8, 0.5, SMALL))
    return claim(
        f"{one['title']}, DataSVD alone, at {EARLY} of the size (over {MARGIN:.0f} points lost counts as sharp)",
        "degrades sharply after removing 20 %" if one["in_paper"] else "transformers only",
        f"{between(lost, '.1f')} points below the full network; {others}",
        holds if one["in_paper"] else None,
        "" if holds else f"{ENERGY:.0%} of the energy of a layer's output lies in {share} of its rank",
    )


def draw(data: Mapping[str, Any]) -> Any:
    """A panel for each network: accuracy against the budget, with the spread over seeds as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(1, len(data["networks"]), squeeze=False)[0]
    for panel, one in zip(panels, data["networks"], strict=True):
        _draw_panel(panel, data["budgets"], one)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    panels[0].set_ylabel(f"accuracy on {data['images']} test images, %")
    return figure


def _draw_panel(panel: Any, budgets: Sequence[float], one: Mapping[str, Any]) -> None:
    panel.axhline(one["full"], color="0.35", linewidth=1)
    told = f"full network, {one['full']:.1f} %"
    panel.annotate(told, (min(budgets), one["full"]), (0, 10), textcoords="offset points", fontsize=8)
    for key, label, colour in (("consolidated", "consolidated", "#0072b2"), ("datasvd", "DataSVD alone", "#d55e00")):
        cells = [spread(column) for column in zip(*one[key], strict=True)]
        means, deviations = [cell["mean"] for cell in cells], [cell["sd"] for cell in cells]
        low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
        panel.fill_between(budgets, low, high, color=colour, alpha=0.25, linewidth=0)
        panel.plot(budgets, means, color=colour, marker="o", markersize=3.5, label=label)
    below = f"{MARGIN:.0f} points below the full network"
    panel.axhline(one["full"] - MARGIN, color="0.35", linewidth=1, linestyle=":", label=below)
    panel.set(title=one["title"], xlabel="relative size of the factorised layers", ylim=(0, 100), xticks=budgets)


STUDY = Study(
    name="vision",
    title="A vision transformer and ResNet-20 at every size",
    shows="accuracy by budget on CIFAR-10, DataSVD alone and consolidated, of ResNet-20 and of a small vision"
    " transformer (trained first where it was not before: a quarter of an hour more); the paper's own row, DINOv3 on"
    " ImageNet, is `flexrank run examples/paper/dinov3-vitl16.yaml`",
    paper="DINOv3 ViT-L/16 to ViT-7B/16 stay within 5 points of the full model down to .3 of its size; methods based"
    " on SVD alone degrade sharply after removing 20 % (section 5.2, accuracy by budget)",
    minutes=12,
    run=run,
    draw=draw,
    full_minutes=160,
)
