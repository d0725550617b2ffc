"""A small vision transformer and ResNet-20 on CIFAR-10 at every size (FlexRank, figure of section 5.2, bottom).

For each network and seed: DataSVD on some training images, sensitivities on others, one joint chain of ranks, and
consolidation on the rest, by distillation alone. Labels are never used, and no stage sees a test image.
"""

import contextlib
import copy
import dataclasses
import functools
import shutil
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexrank import LogitObjective, ProfileChain, allocate_ranks, collect_moments, decompose_, probe_sensitivity
from flexrank.data.images import Scaling
from flexrank.distill import distill_, distillation_evaluator
from flexrank.files import digest_file, read_json
from flexrank.hf.models import eager_attention, load_model
from flexrank.nn.select import select_layers
from flexrank.nn.switch import use_profile
from flexrank.progress import track
from flexrank.run.stages import autocast_dtype
from research.assets import assets_directory
from research.experiment import EVERY_RANK, Experiment, Ledger, Request
from research.figures import OTHER, OURS, draw_level, draw_seeds, panels
from research.measures import AlteredBatches, accuracy, leading_count
from research.result import Result, between, claim, shown, spread, spreads, table
from research.studies import resnet, vit

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
#: Beside the study's own directory, where a training by examples/train_vit.py may have left it.
VIT_DIRECTORY = "vit-cifar10"
RESNET_FILE = "cifar10_resnet20/resnet20_jpg_ft.safetensors"
OBJECTIVE = LogitObjective()
STAGES = {"datasvd": "DataSVD alone", "consolidated": "consolidated"}
#: Points of accuracy, and the budgets of the claims: the smallest one, and the first after 20 % are gone.
MARGIN, SMALL, EARLY = 5.0, 0.3, 0.7
ENERGY = 0.99


@dataclasses.dataclass(frozen=True)
class Plan:
    """The size of a seed's work: steps, images for the moments and the probe, ranks of each layer, test images."""

    steps: int
    batch_size: int = 64
    calibration: int = 512
    probe: int = 256
    levels: int = 10
    warmup_steps: int = 30
    test: int | None = None  # how many are classified; None for all


QUICK = Plan(steps=500, probe=128, test=2000)
FULL = Plan(steps=6000, batch_size=128, calibration=1024, probe=512, warmup_steps=200)


class Network(NamedTuple):
    """One network to compress, in eval mode; `in_paper` where the paper's claims are about networks of its kind."""

    name: str
    title: str
    model: nn.Module
    scaling: Scaling
    learning_rate: float
    digest: str
    in_paper: bool


class Images(NamedTuple):
    """Training images and test images, uint8 (N, C, H, W), and the classes of the latter (N,)."""

    training: Tensor
    test: Tensor
    classes: Tensor


def run(request: Request) -> Result:
    """Both networks on CIFAR-10; the vision transformer is trained first where that was not done before."""
    assets = assets_directory("cifar10", RESNET_FILE)
    directory = request.work.parent / VIT_DIRECTORY
    if not (directory / vit.RECORD).is_file():
        vit.train_vit(assets / "cifar10", directory)
    scaling, weights = Scaling.read(directory / "preprocessor_config.json"), directory / "model.safetensors"
    transformer, convolutions = load_model(directory, "classification"), resnet.load_resnet20(assets / RESNET_FILE)
    networks = (
        Network("vit", "vision transformer", transformer, scaling, 5e-4, digest_file(weights), True),
        Network("resnet20", "ResNet-20", convolutions, resnet.SCALING, 1e-3, digest_file(assets / RESNET_FILE), False),
    )
    training, _ = vit.read_tensors(assets / "cifar10" / vit.TRAIN)
    images = Images(training, *vit.read_tensors(assets / "cifar10" / vit.TEST))
    result = compress(networks, images, FULL if request.full else QUICK, request)
    record = read_json(directory / vit.RECORD)
    # Not in the key of the finished parts: the digest of the weights identifies the training there.
    trained = {"training_of_the_transformer": record["recipe"] | {"accuracy": record["accuracy"]}}
    return result | {"settings": result["settings"] | trained}


def compress(networks: Sequence[Network], images: Images, plan: Plan, request: Request) -> Result:
    """Every network with every seed: the study's result."""
    some = images._replace(test=images.test[: plan.test], classes=images.classes[: plan.test])
    rates = {one.name: {"digest": one.digest, "learning_rate": one.learning_rate} for one in networks}
    sizes = [len(images.training), len(images.test)]
    settings = dataclasses.asdict(plan) | {"networks": rates, "images": sizes, "budgets": list(BUDGETS)}
    ledger, results = Ledger(request.work, settings), []
    for network in networks:
        full = ledger.take(f"{network.name}, full", _measure, network.model, network, some)
        whole = ledger.take(f"{network.name}, whole", _measure, network.model, network, images)
        trials = [_Trial(network, some, plan, seed, ledger).run() for seed in range(request.seeds)]
        size = sum(parameter.numel() for parameter in network.model.parameters())
        facts = {"title": network.title, "in_paper": network.in_paper, "size": size, "full": full, "whole": whole}
        results.append(facts | {key: [trial[key] for trial in trials] for key in trials[0]})
    data = {"budgets": list(BUDGETS), "networks": results, "images": len(some.test)}
    claims = _claims(results, plan.steps * plan.batch_size / len(images.training))
    return {"settings": settings | {"seeds": request.seeds}, "tables": _tables(data), "claims": claims, "data": data}


class _Trial:
    """One network with one seed, which draws the calibration's images, the order, the crops and the profiles."""

    def __init__(self, network: Network, images: Images, plan: Plan, seed: int, ledger: Ledger):
        self.network, self.images, self.plan, self.seed, self.ledger = network, images, plan, seed, ledger
        self.label = f"{network.name}, seed {seed}"
        self.checkpoint = ledger.directory / f"{self.label}, distilled"  # an interrupted consolidation goes on from it
        order = torch.randperm(len(images.training), generator=torch.Generator().manual_seed(seed))
        self.calibration, self.probe, self.rest = order.tensor_split((plan.calibration, plan.calibration + plan.probe))

    def run(self) -> dict[str, Any]:
        chain = ProfileChain.from_json(self.ledger.take(f"{self.label}, chain", lambda: self.allocate().to_json()))
        share = self.ledger.take(f"{self.label}, energetic share", self.energetic_share)
        before = self.ledger.take(f"{self.label}, datasvd", self.accuracies, chain)
        after = self.ledger.take(f"{self.label}, consolidated", self.consolidate, chain)
        if self.checkpoint.exists():  # not where an earlier process finished the unit and removed it
            shutil.rmtree(self.checkpoint)
        sizes = [chain.model_parameters(chain.entry_at(budget)) for budget in BUDGETS]
        return {"datasvd": before, "consolidated": after, "parameters": sizes, "energetic_share": share}

    @functools.cached_property
    def decomposed(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The elastic network, decomposed by the calibration's images, and its layers' energies."""
        model = copy.deepcopy(self.network.model)
        moments = collect_moments(model, self.batches(self.calibration), select_layers(model))
        return model, decompose_(model, moments)

    @property
    def model(self) -> nn.Module:
        return self.decomposed[0]

    def energetic_share(self) -> float:
        """Share of a layer's components that hold 99 % of its output's energy, a mean over the layers."""
        layers = self.decomposed[1].values()
        return statistics.fmean(leading_count(energies, ENERGY) / len(energies) for energies in layers)

    def allocate(self) -> ProfileChain:
        """One nested profile for each budget."""
        evaluate = distillation_evaluator(self.network.model, self.batches(self.probe), OBJECTIVE)
        checkpoint = self.ledger.directory / f"{self.label}, probe.json"
        table = probe_sensitivity(
            self.model, evaluate, self.plan.levels, spacing="parameters", checkpoint=checkpoint, **EVERY_RANK
        )
        return allocate_ranks(table, BUDGETS, **EVERY_RANK)

    def consolidate(self, chain: ProfileChain) -> list[float]:
        """Trains all profiles together, and measures them."""
        plan, network = self.plan, self.network
        batches = AlteredBatches(self.images.training[self.rest], network.scaling, plan.batch_size, self.seed)
        with _short_attention(self.model), _short_attention(network.model):
            distill_(
                self.model, network.model, batches, chain, objective=OBJECTIVE, steps=plan.steps, seed=self.seed,
                learning_rate=network.learning_rate, warmup_steps=plan.warmup_steps, teacher_cache=0,
                autocast=autocast_dtype("auto", torch.device("cpu")), checkpoint=self.checkpoint,
            )  # fmt: skip
        return self.accuracies(chain)

    def accuracies(self, chain: ProfileChain) -> list[float]:
        """In percent, at each budget."""
        accuracies = []
        for budget in track(BUDGETS, f"classifying, {self.label}"):
            with use_profile(self.model, chain.at(budget)):
                accuracies.append(_measure(self.model, self.network, self.images))
        return accuracies

    def batches(self, rows: Tensor) -> list[Tensor]:
        """Training images (B, C, H, W) as the network reads them."""
        return list(vit.scaled_batches(self.images.training[rows], self.network.scaling))


def _measure(model: nn.Module, network: Network, images: Images) -> float:
    """Test accuracy in percent."""
    return 100 * accuracy(model, vit.scaled_batches(images.test, network.scaling), images.classes)


def _short_attention(model: Any) -> contextlib.AbstractContextManager[None]:
    """Attention as plain products, for a transformer: 65 tokens are too few for torch's fused backward pass."""
    return eager_attention(model) if hasattr(model, "set_attn_implementation") else contextlib.nullcontext()


def _tables(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Accuracies, and what the budgets are in parameters of the whole network."""
    networks, columns = data["networks"], [f"{budget:.1f}" for budget in data["budgets"]]
    quality = [
        [f"{one['title']}, {stage}", one["full"], *spreads(one[key])]
        for one in networks
        for key, stage in STAGES.items()
    ]
    sizes = [
        [one["title"], one["whole"], one["size"], *(round(s["mean"]) for s in spreads(one["parameters"]))]
        for one in networks
    ]
    title = f"accuracy on the first {data['images']} test images of CIFAR-10 in %, by budget"
    whole = "accuracy of the full networks on all test images in %, and parameters by budget"
    return [
        table(title, ["network, stage", "full", *columns], quality, digits=2),
        table(whole, ["network", "accuracy", "full", *columns], sizes, digits=2),
    ]


def _claims(networks: Sequence[Mapping[str, Any]], passes: float) -> list[dict[str, Any]]:
    """The consolidated networks at SMALL, then DataSVD alone at EARLY; of those not in the paper, figures alone."""
    consolidated, datasvd = [], []
    for one in networks:
        title, lost, early = one["title"], _lost(one, "consolidated", SMALL), _lost(one, "datasvd", EARLY)
        within, sharp = max(lost) <= MARGIN, min(early) > MARGIN
        share = shown(spread(one["energetic_share"]), 2)
        consolidated.append(claim(
            f"{title}, consolidated, at {SMALL} of the size, every seed",
            f"within {MARGIN:.0f} points of the full model" if one["in_paper"] else "transformers only",
            f"{between(lost, '.1f')} points below the full network's {one['full']:.1f} %",
            within if one["in_paper"] else None,
            "" if within else f"consolidation here saw the images {passes:.1f} times, the paper's about 20 times",
        ))  # fmt: skip
        datasvd.append(claim(
            f"{title}, DataSVD alone, at {EARLY} of the size (over {MARGIN:.0f} points lost counts as sharp)",
            "degrades sharply after removing 20 %" if one["in_paper"] else "transformers only",
            f"{between(early, '.1f')} points below the full network",
            sharp if one["in_paper"] else None,
            "" if sharp else f"{ENERGY:.0%} of the energy of a layer's output lies in {share} of its rank",
        ))  # fmt: skip
    return consolidated + datasvd


def _lost(one: Mapping[str, Any], stage: str, budget: float) -> list[float]:
    """Points of accuracy below the full network, for each seed."""
    return [one["full"] - values[BUDGETS.index(budget)] for values in one[stage]]


def draw(data: Mapping[str, Any]) -> Any:
    """A panel for each network: accuracy against the budget, with the range over seeds as a band."""
    figure, places = panels(len(data["networks"]), (8, 3.6))
    for axes, one in zip(places, data["networks"], strict=True):
        draw_level(axes, one["full"], linestyle="-")
        label, at = f"full network, {one['full']:.1f} %", (min(data["budgets"]), one["full"])
        axes.annotate(label, at, (0, 10), textcoords="offset points", fontsize=8)
        for key, colour in (("consolidated", OURS), ("datasvd", OTHER)):
            draw_seeds(axes, data["budgets"], one[key], colour, STAGES[key])
        draw_level(axes, one["full"] - MARGIN, f"{MARGIN:.0f} points below the full network")
        axes.set(title=one["title"], xlabel="relative size of the factorised layers", ylim=(0, 100))
        axes.set_xticks(data["budgets"])
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    places[0].set_ylabel(f"accuracy on {data['images']} test images, %")
    return figure


EXPERIMENT = Experiment(
    name="vision", title="A vision transformer and ResNet-20 at every size",
    shows="accuracy by budget on CIFAR-10, DataSVD alone and consolidated, of ResNet-20 and of a small vision"
    " transformer (trained first where it was not before: a quarter of an hour more); the paper's own row, DINOv3 on"
    " ImageNet, is `flexrank run examples/paper/dinov3-vitl16.yaml`",
    paper="DINOv3 ViT-L/16 to ViT-7B/16 stay within 5 points of the full model down to .3 of its size; methods based"
    " on SVD alone degrade sharply after removing 20 % (section 5.2, accuracy by budget)",
    minutes=12, full_minutes=160, seeds=(3, 3), run=run, draw=draw,
)  # fmt: skip
