"""Their `ACIPModel` with `SVDLinearParametrization` and LoRA is run, with its losses, optimiser, callbacks and sizes.

We call the callbacks ourselves. Lightning, wandb and two of their modules that need plotly and data sets are replaced
by empty modules. Their loss expects a `GenerationMixin`; transformers' models no longer inherit it, so we mix it in.
`ACIPModel` gets the config class of its parent, because transformers replaces its constructor.

Units differ. Their masks start at .02 and our scores at 1, so our scores and their learning rate are theirs divided by
.02, and our λ is theirs times .02. Their training has a rate of 5e-5, which is .0025 in our units, and multiplies λ by
1.01 at every fourth step; here both sides have the rates of one of our short trainings. Where our version differs on
purpose, both sides are set alike. We count gauge-aligned layers with their adapters, and they count the two factors
alone, as both do here. Our λ moves along a line and theirs only rises, as both do here. They train the adapters further
at the smallest size, and we at all sizes; this is not run. Where a size falls between two masks, they take the larger
one and we the one that fits, so their mask is compared with one value less. Of the values that vanish in one step they
keep all or none, and we keep some by their last scores; here no two vanish together. They decompose in float32, and we
in float64.
"""

import copy
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from flexrank.data.batches import Batch, token_mask
from research.baselines.statistics import next_token_loss
from research.baselines.trained import acip
from research.originals.original import RANKS, Row, difference, importing, row, tiny_model

SIZES = (0.9, 0.7, 0.5, 0.3, 0.1)
#: Where their masks start; adapters' ranks and learning rate; and steps, after which some values are gone.
SCALE, ADAPTER, RATE, STEPS = 2e-2, 4, 1e-3, 30
#: Steps of the training whose rates both use, λ at first, and the learning rate of scores.
COURSE, PENALTY = 100, 1e-3
SCORES_RATE = acip.TRAVEL / COURSE


def compare(clone: Path) -> list[Row]:
    """Compares layers, one backward pass, training steps, the order that a course of scores gives, and its sizes."""
    model, layers, batches = tiny_model()
    with importing(clone, _stubs()):
        own = [Pair(model, layers) for _ in range(4)]
        return [*_layers(own[0]), *_backward(own[1], batches), *_steps(own[2], batches), *_sizes(own[3])]


class Labels:
    """Their objective: the mean loss of the batch's next tokens; the base model is not used."""

    def target(self, output: Any, batch: Batch) -> Tensor:
        """Returns an empty target."""
        return torch.empty(0)

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """Returns the mean over the tokens that are predicted."""
        mask = token_mask(batch)
        assert mask is not None
        return next_token_loss(output, batch) / (mask[:, 1:] & mask[:, :-1]).sum()


class Rising(acip.Pressure):
    """λ grows at every step, because the model is always above a line that stays at zero."""

    def wanted(self, step: float) -> float:
        """Returns zero."""
        return 0.0


class Pair:
    """Our model and theirs, with equal adapters, and the training objective of each."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Linear]):
        task: Any = SimpleNamespace(teacher=model, layers=layers, seed=0)
        self.model, self.layers = acip.scored(task, ADAPTER)
        self.theirs = _theirs(model, list(layers))
        self.pressure = Rising(self.layers, 0.0, COURSE, PENALTY)
        self.penalised = acip.Penalised(Labels(), self.pressure)
        loss = _module("training.objective")
        parts = {"task_objective": loss.TaskLoss(), "reg_objective": loss.LpRegularizationLoss()}
        self.combined = loss.CombinedLoss(parts, dict.fromkeys(parts, 1.0))
        for name, layer in self.layers.items():
            self.adapter(name, "A").data.copy_(layer.down)

    def their(self, name: str) -> Any:
        """Returns their layer, without its adapter; its mask is our score times `SCALE`."""
        return self.theirs.model.get_submodule(f"{name}.base_layer.parametrization")

    def adapter(self, name: str, side: str) -> nn.Parameter:
        """Returns a matrix of their adapter: A is our `down`, B our `up`."""
        return self.theirs.model.get_submodule(f"{name}.lora_{side}.default").weight

    @torch.no_grad()
    def set_scores(self, scores: Tensor) -> None:
        """Gives both models these scores, those of all layers concatenated."""
        parts = scores.split([len(layer.score) for layer in self.layers.values()])
        for (name, layer), part in zip(self.layers.items(), parts, strict=True):
            layer.score.copy_(part)
            self.their(name).mask.copy_(SCALE * part)

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns both losses on labels, with λ Σ |score| added."""
        ours = self.penalised.loss(self.model(**batch), torch.empty(0), batch)
        return ours, self.combined({**batch, "labels": batch["input_ids"]}, self.theirs)["loss"]


def _layers(pair: Pair) -> list[Row]:
    values, matrices = list[float](), list[float]()
    for name, layer in pair.layers.items():
        values.append(difference(layer.values, pair.their(name).S))
        for rank in RANKS:
            layer.mask = torch.zeros_like(layer.values)
            layer.mask[:rank] = 1
            pair.their(name).mask.data.copy_(SCALE * layer.mask)
            ours = layer(torch.eye(layer.shape[1])).T  # the adapter is 0 at first
            matrices.append(difference(ours, pair.their(name).weight))
    return [row("singular values", values, 1e-5), row(f"layers at ranks {RANKS}", matrices, 1e-4)]


def _backward(pair: Pair, batches: Sequence[Any]) -> list[Row]:
    """Compares a backward pass in which half of the scores are 0, and no adapter is."""
    _trainable(pair)
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(_count(pair), generator=generator)
    pair.set_scores(scores * (scores > 0.5))
    for name, layer in pair.layers.items():
        layer.up.data.normal_(std=0.1, generator=generator)
        pair.adapter(name, "B").data.copy_(layer.up)
    pair.combined.loss_weights["reg_objective"] = PENALTY / SCALE
    logits = [difference(pair.model(**batch).logits, pair.theirs(**batch).logits) for batch in batches]
    ours, theirs = pair.losses(batches[0])
    (ours + theirs).backward()
    gradients = _differences(pair, lambda one: one.grad, SCALE)
    return [
        row("logits, half of all values gone", logits, 1e-3),
        row("loss with its penalty", [difference(ours, theirs)], 1e-5),
        row("gradients of scores", gradients[0], 1e-3),
        row("gradients of adapters", gradients[1], 1e-3),
    ]


def _steps(pair: Pair, batches: Sequence[Any]) -> list[Row]:
    process = SimpleNamespace(model=pair.theirs, objective=pair.combined, log=lambda *_, **__: None)
    callbacks, optimizers = _callbacks(pair, process), _trainable(pair)
    for step in range(STEPS):
        pair.pressure.update(step)
        ours, theirs = pair.losses(batches[step % len(batches)])
        (ours + theirs).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for callback in callbacks:
            callback.on_train_batch_end(None, process, None, None, step)
    pair.pressure.update(STEPS)
    scores, adapters = _differences(pair, nn.functional.relu, 1 / SCALE)
    ages = [STEPS + 1 - last for last in pair.pressure.last.values()]
    their_ages = [-pair.their(name).mask_score.clamp(max=0) for name in pair.layers]
    gone = sum(int((age > 0).sum()) for age in ages)
    return [
        row(f"scores after {STEPS} steps, {gone} of {_count(pair)} gone", scores, 1e-3),
        row(f"adapters after {STEPS} steps", adapters, 1e-3),
        row(
            "λ after these", [abs(pair.combined.loss_weights["reg_objective"] * SCALE / pair.pressure.weight - 1)], 1e-5
        ),
        row("for how many steps each value has been zero", [difference(torch.cat(ages), torch.cat(their_ages))], 0.0),
    ]


def _sizes(pair: Pair) -> list[Row]:
    """Removes one value at each step of a course of scores, and compares the masks that each side's order gives."""
    process = SimpleNamespace(model=pair.theirs, training_phase="acip")
    updater, generator = _module("training.acip").MaskScoreMapUpdater(), torch.Generator().manual_seed(2)
    going = torch.randperm(_count(pair), generator=generator)[: _count(pair) // 2]
    for step in range(len(going)):
        scores = 0.1 + torch.rand(_count(pair), generator=generator)
        scores[going[: step + 1]] = 0
        pair.set_scores(scores)
        pair.pressure.update(step)
        updater.on_train_batch_end(None, process, None, None, step)
    places = pair.pressure.order()
    theirs = torch.cat([pair.their(name).mask_score for name in pair.layers]).argsort(descending=True)
    masks, beyond = list[float](), list[float]()
    with mock.patch.object(acip.ScoredLinear, "parameters_at", _of_two_factors):
        for size in SIZES:
            one, share = _their_masks(pair.theirs, size)
            ours = torch.cat(list(acip.masks_within(pair.layers, places, size * pair.pressure.dense).values()))
            masks.append(difference(ours, torch.cat(list(one.values()))))
            beyond.append(share - size)
    return [
        row(
            f"order of values, {len(going)} of {_count(pair)} gone",
            [difference(torch.cat(list(places.values())), theirs.argsort())],
            0.0,
        ),
        row(f"masks at sizes {SIZES}, theirs with one value less", masks, 0.0),
        row("share by which theirs is above these sizes", beyond),
    ]


def _of_two_factors(layer: acip.ScoredLinear, values: int) -> int:
    """Returns the parameters as they count them."""
    return min(math.prod(layer.shape), values * sum(layer.shape))


def _their_masks(theirs: Any, size: float) -> tuple[dict[str, Tensor], float]:
    """Returns masks with one value less than theirs has at this size, and the share of parameters that theirs has."""
    theirs.prune_model_by_score(size_ratio=size)
    gone = sum(int((mask <= 0).sum()) for mask in theirs.get_target_params().values())
    return theirs._predict_size_ratio_by_score(gone + 1)[1], theirs.get_size_ratio()


def _count(pair: Pair) -> int:
    return sum(len(layer.score) for layer in pair.layers.values())


def _differences(pair: Pair, of: Callable[[Any], Any], factor: float) -> tuple[list[float], list[float]]:
    """Returns the differences of scores, theirs times this factor, and of adapters.

    Scores are concatenated, because a layer may have none left.
    """
    scores = [of(layer.score) for layer in pair.layers.values()]
    theirs = [factor * of(pair.their(name).mask) for name in pair.layers]
    adapters = list[float]()
    for name, layer in pair.layers.items():
        for ours, side in ((layer.down, "A"), (layer.up, "B")):
            adapters.append(difference(of(ours), of(pair.adapter(name, side))))
    return [difference(torch.cat(scores), torch.cat(theirs))], adapters


def _trainable(pair: Pair) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Returns the optimisers of scores and adapters, ours and theirs, which freeze everything else."""
    groups = {"target_params": ["mask"], "tuning_params": ["lora_A.default.weight", "lora_B.default.weight"]}
    rates = {"target_params": {"lr": SCORES_RATE * SCALE}, "tuning_params": {"lr": RATE}}
    theirs = _module("training.optimizer").BaseOptimizerFactory(
        group_params=groups, group_params_kwargs=rates, general_optimizer_kwargs={"weight_decay": 0.0},
        reset_tunable_params=True,
    )  # fmt: skip
    scores = [layer.score for layer in pair.layers.values()]
    adapters = [one for layer in pair.layers.values() for one in (layer.down, layer.up)]
    own = [{"params": scores, "lr": SCORES_RATE}, {"params": adapters, "lr": RATE}]
    return torch.optim.AdamW(own, weight_decay=0.0), theirs(pair.theirs)


def _callbacks(pair: Pair, process: Any) -> list[Any]:
    """Returns their callbacks: for λ, which we raise before a step and they after it, and for scores."""
    training = _module("training.acip")
    scheduler = training.ACIPScheduler(
        acip_stop_ratio=0.0, reg_scheduler_start_weight=PENALTY * pair.pressure.growth / SCALE,
        reg_scheduler_update_every=1, reg_scheduler_update_factor=pair.pressure.growth,
    )  # fmt: skip
    scheduler.on_fit_start(None, process)
    return [scheduler, training.MaskScoreMapUpdater()]


def _module(name: str) -> Any:
    return importlib.import_module(f"acip.{name}")


def _theirs(model: nn.Module, names: list[str]) -> Any:
    """Returns their model, made of a copy of this one."""
    import peft
    from transformers import GenerationMixin

    core = _module("core.parametrized_model")
    adapters = peft.LoraConfig(
        r=ADAPTER, lora_alpha=ADAPTER, lora_dropout=0.0, target_modules=names,
        exclude_modules=["ortho", "parametrization", "base"],
    )  # fmt: skip
    config = core.ParametrizedModelConfig(
        parametrization_config=core.ParametrizationConfig("svd", {"mask_scaling_factor": SCALE}, names),
        adapter_config=core.AdapterConfig(adapters),
    )
    kind = type("ACIPModel", (_module("core.acip_model").ACIPModel, GenerationMixin), {})
    return kind(config, copy.deepcopy(model))


def _stubs() -> dict[str, ModuleType]:
    """Returns stubs for modules that their training modules import, and do not need for what is run."""
    contents: dict[str, dict[str, Any]] = {
        "wandb": {"run": None},
        "lightning": {},
        "lightning.pytorch": {"Callback": type("Callback", (), {}), "Trainer": object},
        "lightning.pytorch.utilities": {},
        "lightning.pytorch.utilities.types": {"STEP_OUTPUT": object},
        "acip.training.pl_module": {"BaseLitModule": object},
        "acip.training.utils": {"generate_params_plot": None, "stop_train": None},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
    vars(modules["lightning"])["pytorch"] = modules["lightning.pytorch"]
    return modules
