"""A small vision transformer and ResNet-20 on CIFAR-10 at every size (FlexRank, figure of section 5.2, bottom).

For each network and seed: DataSVD on some training images, sensitivities on others, one joint chain of ranks, and
consolidation on the rest, by distillation only. Labels are never used, and no stage sees a test image.
"""

import contextlib
import copy
import functools
import math
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flexrank import (
    LogitObjective,
    ProfileChain,
    RankProfile,
    allocate_ranks,
    collect_moments,
    decompose_,
    probe_sensitivity,
)
from flexrank.data.halves import half_indices
from flexrank.data.images import Scaling
from flexrank.distill import distill_, distillation_evaluator
from flexrank.files import digest_file, read_json
from flexrank.hf.models import eager_attention, load_model
from flexrank.nn.select import select_layers
from flexrank.nn.switch import use_profile
from flexrank.progress import track
from flexrank.run.training import autocast_dtype
from research.assets import assets_directory
from research.experiment import BUDGETS, EVERY_RANK, Experiment, Ledger, Request
from research.figures import NEUTRAL, OTHER, OURS, draw_level, draw_seeds, panels
from research.measures import AlteredBatches, accuracy, leading_count
from research.result import Result, between, claim, measured, shown, spread, spreads, table
from research.studies import cifar

#: The networks, with their learning rates of consolidation.
NETWORKS = {"vit": 1e-4, "resnet20": 2.5e-4}
#: A directory beside the study's own, for the transformer that it trains once.
VIT_DIRECTORY = "vit-cifar10"
RESNET_FILE = "cifar10_resnet20/resnet20_jpg_ft.safetensors"
OBJECTIVE = LogitObjective()
STAGES = {
    "svd": "SVD alone", "datasvd": "DataSVD alone", "consolidated": "DataSVD consolidated",
    "fisher": "weighted by gradients too, alone", "ours": "weighted by gradients too, consolidated",
    "alone": "DataSVD, each size trained alone with all the steps",
}  # fmt: skip
#: Budgets that a network is trained for separately, with the first seed: the limit of its steps.
SEPARATE_BUDGETS = (0.8, 0.5, 0.3, 0.2)
#: Points of accuracy, and the budgets of the claims: the smallest one, and the first with 20 % removed.
MARGIN, SMALL, EARLY = 5.0, 0.3, 0.7
#: For a seed: steps, images per step, of the moments and of the probe, ranks per layer, test images (None for all).
QUICK: dict[str, Any] = {
    "steps": 500, "batch_size": 64, "calibration": 512, "probe": 128, "levels": 10, "warmup_steps": 30, "test": 2000,
}  # fmt: skip
FULL = QUICK | {"steps": 6000, "batch_size": 128, "calibration": 1024, "probe": 512, "warmup_steps": 200, "test": None}


class Images(NamedTuple):
    """Training images and test images, uint8 (N, C, H, W), and the classes (N,) of the test images."""

    training: Tensor
    test: Tensor
    classes: Tensor


class Network(NamedTuple):
    """One network to compress, in eval mode."""

    name: str
    title: str
    model: nn.Module
    scaling: Scaling
    learning_rate: float
    digest: str

    def batches(self, images: Tensor) -> Iterable[Tensor]:
        """Returns images, uint8 (N, C, H, W), in batches (B, C, H, W) as the network reads them."""
        return cifar.scaled_batches(images, self.scaling)

    def accuracy(self, model: nn.Module, images: Images) -> float:
        """Returns the percentage of the test images that a form of the network classifies correctly."""
        return 100 * accuracy(model, self.batches(images.test), images.classes)


def run(request: Request) -> Result:
    """Runs the study on both networks."""
    networks = [network(name, request.work) for name in NETWORKS]
    result = compress(networks, read_images(), FULL if request.full else QUICK, request)
    record = read_json(request.work.parent / VIT_DIRECTORY / cifar.RECORD)
    # In the key of the finished parts, the digest of the weights identifies the training.
    result["settings"] |= {"training_of_the_transformer": record["recipe"] | {"accuracy": record["accuracy"]}}
    return result


def network(name: str, work: Path) -> Network:
    """Returns one of `NETWORKS`; the vision transformer is trained first, unless a study beside `work` has done so."""
    assets = assets_directory("cifar10", RESNET_FILE)
    if name == "resnet20":
        file = assets / RESNET_FILE
        model, scaling = cifar.load_resnet20(file), cifar.RESNET_SCALING
        return Network(name, "ResNet-20", model, scaling, NETWORKS[name], digest_file(file))
    directory = work.parent / VIT_DIRECTORY
    if not (directory / cifar.RECORD).is_file():
        cifar.train_vit(assets / "cifar10", directory, cifar.Recipe())
    model, scaling = load_model(directory, "classification"), Scaling.read(directory / "preprocessor_config.json")
    digest = digest_file(directory / "model.safetensors")
    return Network(name, "vision transformer", model, scaling, NETWORKS[name], digest)


def read_images() -> Images:
    """Returns all of the assets' images."""
    directory = assets_directory("cifar10") / "cifar10"
    training, _ = cifar.read_tensors(directory / cifar.TRAIN)
    return Images(training, *cifar.read_tensors(directory / cifar.TEST))


def compress(networks: Sequence[Network], images: Images, plan: Mapping[str, Any], request: Request) -> Result:
    """Returns the study's result, of every network with every seed; the claims are on the first, the transformer."""
    rates = {one.name: {"digest": one.digest, "learning_rate": one.learning_rate} for one in networks}
    sizes = [len(images.training), len(images.test)]
    settings = {**plan, "networks": rates, "images": sizes, "budgets": list(BUDGETS)}
    ledger, results = Ledger(request.work, settings), []
    rows = half_indices(request.half, images.test)[: plan["test"]]
    images = images._replace(test=images.test[rows], classes=images.classes[rows])
    for network in networks:
        full = ledger.take(f"{network.name}, full", network.accuracy, network.model, images)
        trials = [_Trial(network, images, plan, seed, ledger) for seed in range(request.seeds)]
        parts = [trial.run() for trial in trials]
        figures = {key: [one[key] for one in parts] for key in parts[0]} | {"alone": [trials[0].trained_separately()]}
        results.append({"title": network.title, "full": full, **figures})
    data = {"budgets": list(BUDGETS), "networks": results, "images": len(images.test)}
    claims = _claims(results[0], plan["steps"] * plan["batch_size"] / len(images.training))
    claims += [_losers(one, len(images.test)) for one in results]
    return measured(settings | {"seeds": request.seeds}, [_table(data)], claims, data)


class _Trial:
    """One network with one seed, which draws the calibration images, the order, the crops and the profiles."""

    def __init__(self, network: Network, images: Images, plan: Mapping[str, Any], seed: int, ledger: Ledger):
        self.network, self.images, self.plan, self.seed, self.ledger = network, images, plan, seed, ledger
        self.label = f"{network.name}, seed {seed}"
        order = torch.randperm(len(images.training), generator=torch.Generator().manual_seed(seed))
        parts = order.tensor_split((plan["calibration"], plan["calibration"] + plan["probe"]))
        self.calibration, self.probe, self.rest = (images.training[rows] for rows in parts)

    def run(self) -> dict[str, Any]:
        """Returns accuracies by budget before and after consolidation, and the share of components with the energy."""
        take, label, chain = self.ledger.take, self.label, self.chain
        share = take(f"{label}, energetic share", self.energetic_share)
        plain = take(f"{label}, svd", self.plain_svd)
        before = take(f"{label}, datasvd", lambda: self.accuracies(self.decomposed[0], chain))
        after = take(f"{label}, consolidated", lambda: self.accuracies(self.trained(chain), chain))
        ours = take(f"{label}, fisher", self.by_gradients)
        return {"svd": plain, "datasvd": before, "consolidated": after, "energetic_share": share} | ours

    def trained_separately(self) -> list[float | None]:
        """Returns accuracies by budget; at `SEPARATE_BUDGETS`, of a network trained for it alone with all the steps."""

        def accuracy(budget: float) -> float:
            profile = self.chain.at(budget)
            with use_profile(self.trained([profile]), profile) as model:
                return self.network.accuracy(model, self.images)

        limits = {one: self.ledger.take(f"{self.label}, alone {one:g}", accuracy, one) for one in SEPARATE_BUDGETS}
        return [limits.get(budget) for budget in BUDGETS]

    @functools.cached_property
    def chain(self) -> ProfileChain:
        """The chain, with one nested profile for each budget."""
        found = self.ledger.take(f"{self.label}, chain", lambda: self.searched(self.decomposed[0], "probe").to_json())
        return ProfileChain.from_json(found)

    @functools.cached_property
    def decomposed(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The elastic network, decomposed on the calibration images, and its layers' energies."""
        return self.decompose("datasvd")

    def decompose(self, method: Literal["datasvd", "fisher", "svd"]) -> tuple[nn.Module, dict[str, Tensor]]:
        """Returns what `decomposed` is, by any method."""
        model = copy.deepcopy(self.network.model)
        loss = OBJECTIVE.fisher_loss if method == "fisher" else None
        batches = self.network.batches(self.calibration)
        moments = collect_moments(model, batches, select_layers(model), gradient_loss=loss)
        return model, decompose_(model, moments, method=method)

    def by_gradients(self) -> dict[str, list[float]]:
        """Returns accuracies before and after consolidation by a run's defaults: outputs weighted by gradients too."""
        model, _ = self.decompose("fisher")
        chain = self.searched(model, "fisher")
        before = self.accuracies(model, chain)
        return {"fisher": before, "ours": self.accuracies(self.trained(chain, model), chain)}

    def plain_svd(self) -> list[float]:
        """Returns accuracies of plain SVD at ranks from its own search."""
        model, _ = self.decompose("svd")
        return self.accuracies(model, self.searched(model, "svd"))

    def energetic_share(self) -> float:
        """Returns the share of a layer's components that hold 99 % of its output's energy, averaged over layers."""
        layers = self.decomposed[1].values()
        return statistics.fmean(leading_count(energies, 0.99) / len(energies) for energies in layers)

    def searched(self, model: nn.Module, name: str) -> ProfileChain:
        """Returns the ranks of a decomposed network from its own probe, whose checkpoint has this name."""
        evaluate = distillation_evaluator(self.network.model, list(self.network.batches(self.probe)), OBJECTIVE)
        checkpoint = self.ledger.directory / f"{self.label}, {name}.json"
        options = EVERY_RANK | {"spacing": "parameters", "checkpoint": checkpoint}
        table = probe_sensitivity(model, evaluate, self.plan["levels"], **options)
        return allocate_ranks(table, BUDGETS, **EVERY_RANK)

    def trained(self, profiles: ProfileChain | Sequence[RankProfile], decomposed: nn.Module | None = None) -> nn.Module:
        """Returns a network trained for all profiles together; an interrupted training resumes from its checkpoint."""
        plan, network, model = self.plan, self.network, copy.deepcopy(decomposed or self.decomposed[0])
        checkpoint = self.ledger.directory / f"{self.label}, distilled"
        batches = AlteredBatches(self.rest, network.scaling, plan["batch_size"], self.seed)
        with short_attention(model), short_attention(network.model):
            distill_(
                model, network.model, batches, profiles, objective=OBJECTIVE, steps=plan["steps"], seed=self.seed,
                learning_rate=network.learning_rate, warmup_steps=plan["warmup_steps"], teacher_cache=0,
                autocast=autocast_dtype("auto", torch.device("cpu")), checkpoint=checkpoint,
            )  # fmt: skip
        shutil.rmtree(checkpoint)
        return model

    def accuracies(self, model: nn.Module, chain: ProfileChain) -> list[float]:
        """Returns accuracies in percent, at each budget."""
        accuracies = []
        for budget in track(BUDGETS, f"classifying, {self.label}"):
            with use_profile(model, chain.at(budget)):
                accuracies.append(self.network.accuracy(model, self.images))
        return accuracies


def short_attention(model: Any) -> contextlib.AbstractContextManager[None]:
    """Computes a transformer's attention by plain products: 65 tokens are too few for torch's fused backward pass."""
    return eager_attention(model) if hasattr(model, "set_attn_implementation") else contextlib.nullcontext()


def _table(data: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        [f"{one['title']}, {stage}", one["full"], *spreads(one[key])]
        for one in data["networks"]
        for key, stage in STAGES.items()
    ]
    title = f"accuracy on {data['images']} test images of CIFAR-10 in %, by budget"
    return table(title, ["network, stage", "full", *data["budgets"]], rows, digits=2)


def _claims(one: Mapping[str, Any], passes: float) -> list[dict[str, Any]]:
    """Returns claims on a run's defaults at SMALL, and on DataSVD alone at EARLY."""
    small, early = (
        [one["full"] - accuracies[BUDGETS.index(budget)] for accuracies in one[stage]]
        for stage, budget in (("ours", SMALL), ("datasvd", EARLY))
    )
    share = shown(spread(one["energetic_share"]), 2)
    return [
        claim(f"{one['title']}, consolidated, at {SMALL} of the size, every seed",
              f"within {MARGIN:.0f} points of the full model",
              f"{between(small, '.1f')} points below the full network's {one['full']:.1f} %", max(small) <= MARGIN,
              f"consolidation here saw the images {passes:.1f} times, the paper's about 20 times"),
        claim(f"{one['title']}, DataSVD alone, at {EARLY} of the size (over {MARGIN:.0f} points lost counts as sharp)",
              "degrades sharply after removing 20 %", f"{between(early, '.1f')} points below the full network",
              min(early) > MARGIN, f"99% of the energy of a layer's output lies in {share} of its rank"),
    ]  # fmt: skip


def _losers(one: Mapping[str, Any], images: int) -> dict[str, Any]:
    """Returns the claim that a run's defaults make no size worse, as a mean over seeds."""
    pairs = zip(BUDGETS, zip(*one["fisher"], strict=True), zip(*one["ours"], strict=True), strict=True)
    falls = {budget: statistics.fmean(before) - statistics.fmean(after) for budget, before, after in pairs}
    lost = ", ".join(f"{budget:g} by {fall:.2f} points" for budget, fall in falls.items() if fall > 0)
    error = math.sqrt(one["full"] * (100 - one["full"]) / images)
    return claim(
        f"{one['title']}, by a run's defaults: no size is worse after consolidation than before, on average over seeds",
        "none, which is our own goal", lost or "none is", not lost,
        f"the standard error of an accuracy is {error:.2f} points",
    )  # fmt: skip


def draw(data: Mapping[str, Any]) -> Any:
    """Draws accuracy against the budget, a panel for each network, with the range over seeds as a band."""
    figure, places = panels(len(data["networks"]), (8, 3.6))
    for axes, one in zip(places, data["networks"], strict=True):
        draw_level(axes, one["full"], linestyle="-")
        label, at = f"full network, {one['full']:.1f} %", (min(data["budgets"]), one["full"])
        axes.annotate(label, at, (0, 10), textcoords="offset points", fontsize=8)
        for key, colour in (("ours", OURS), ("datasvd", OTHER), ("svd", NEUTRAL)):
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
    shows="accuracy by budget on CIFAR-10 of ResNet-20 and of a small vision transformer (trained first, a quarter of"
    " an hour more); the paper's own row, DINOv3 on ImageNet, is the Python of examples/paper/README.md",
    paper="DINOv3 ViT-L/16 to ViT-7B/16 stay within 5 points of the full model down to .3 of its size; methods based"
    " on SVD alone degrade sharply after removing 20 % (section 5.2, accuracy by budget)",
    minutes=12, full_minutes=160, has_halves=True, seeds=(3, 3), run=run, draw=draw,
)  # fmt: skip
