"""Consolidation by transformers' Trainer, for those who use its data loading, logging and checkpoints."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from flexrank.data.batches import Batch, call_model
from flexrank.distill import Profiles, profiles_of
from flexrank.distill.mixing import mix_after_steps_
from flexrank.distill.objectives import Objective
from flexrank.distill.optimizer import make_optimizer, scale_vectors_, set_rate
from flexrank.distill.schedule import RunningLosses, Schedule, drawn_weights
from flexrank.distill.step import Targets, loss_scale, require_finite, require_other
from flexrank.distill.trained import set_sizes_, trainable_parameters, training, trimmed_factors
from flexrank.errors import FlexrankError
from flexrank.hf.models import mark_elastic
from flexrank.nn.select import drop_autocast_
from flexrank.nn.switch import layer_shapes, use_profile
from flexrank.profiles import ProfileChain
from flexrank.profiles.costs import full_ranks

#: Values that `args.optim` may have: torch's AdamW, which `make_optimizer` builds.
ADAMW = "adamw_torch", "adamw_torch_fused"


class DistillationTrainer(transformers.Trainer):
    """A Trainer in which each optimiser step draws one profile of an elastic model and follows the frozen teacher.

    The loss, the draws and the trained parameters are those of `distill_`; batches, learning-rate schedule, logging and
    checkpoints are the Trainer's, as `args` says. With gradient accumulation all batches of a step have the same
    weight, where `distill_` weights them by their tokens. The loss does not use labels. Each log has the losses of the
    profiles drawn since the last one, as `loss_at_BUDGET`; evaluation is at the size that the model is set to.
    Dropout is off. A second `train()` begins with a new optimiser. Under torchrun each process trains on its own
    batches and holds complete models: FSDP and DeepSpeed have not been tried.
    """

    optimizer: Any  # the Trainer's, None until it trains

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        chain: Profiles,
        args: transformers.TrainingArguments,
        *,
        objective: Objective | None = None,
        **options: Any,
    ):
        """Gives the elastic model the parameters that its sizes do not share, and sets up the Trainer.

        Args:
            model: an elastic transformers model.
            teacher: the base model.
            chain: its requested profiles are trained; or the profiles themselves, cheapest first.
            args: the Trainer's. The vectors of each size learn at up to 4 times `learning_rate`. `optim` is torch's
                AdamW, with the betas, epsilon and weight decay of `args`.
            objective: defaults to the `default_objective` of the teacher's output.
            options: further options of the Trainer, such as `train_dataset` and `data_collator`, except optimisers.

        Raises:
            FlexrankError: no profiles, profiles of another model, or `args` or options that are not supported here.
        """
        _check(args, options)
        require_other(model, teacher)
        self._profiles = profiles_of(chain, model)
        self._labels = chain.budgets if isinstance(chain, ProfileChain) else range(len(self._profiles))
        full = full_ranks(layer_shapes(model))
        weights = drawn_weights(None, "balanced", [profile == full for profile in self._profiles])
        self._schedule = Schedule(weights, args.seed, 0, args.learning_rate, 0)  # only its draws are used
        self._size_indices = set_sizes_(model, self._profiles)
        mark_elastic(model)
        super().__init__(model=model, args=args, **options)
        self.loss_is_scaled_for_ga = False  # the loss is a mean over each batch's rows
        self.teacher = teacher.to(self.args.device).eval()
        self._targets = Targets(self.teacher, objective, None, 0)
        self._running, self._logged = RunningLosses(), defaultdict[int, list[float]](list)
        self._choice, self._losses = 0, list[float]()  # of the step so far
        self._is_noted = False  # whether `_note` is among the optimiser's hooks

    def train(self, *args: Any, **options: Any) -> Any:
        """Trains as the Trainer does; each call makes a new optimiser, because it trains new parameters."""
        self.optimizer, self._is_noted = None, False
        self._losses.clear()
        self._logged.clear()
        with trimmed_factors(self.model, self._profiles):
            self._trainable = trainable_parameters(self.model, factors_only=len(self._profiles) > 1)
            with training(self.model, self.teacher, self._trainable):
                try:
                    return super().train(*args, **options)
                finally:
                    drop_autocast_(self.model)  # which would stay, and lower the precision of whatever runs it next

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The AdamW of `distill_`, with the betas and the epsilon of `args`."""
        args = self.args
        if self.optimizer is None:
            adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            self.optimizer = make_optimizer(self.model, self._trainable, args.learning_rate, args.weight_decay, **adam)
            set_rate(self.optimizer, args.learning_rate)
        if not self._is_noted:
            scale_vectors_(self.optimizer, self.model, self._scales)
            mix_after_steps_(self.optimizer, self.model, self._scales, self._at_size)
            self.optimizer.register_step_post_hook(self._note)
            self._is_noted = True
        return self.optimizer

    def _scales(self) -> list[float]:
        return self._running.vector_scales(self._size_indices)

    def _at_size(self) -> contextlib.AbstractContextManager[Any]:
        return use_profile(self.model, self._profiles[self._choice])

    def _note(self, *_: Any) -> None:
        """Records the mean loss of the step that the optimiser has just taken."""
        mean = sum(self._losses) / len(self._losses)
        self._running.add(mean, self._choice)
        self._logged[self._choice].append(mean)
        self._losses.clear()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Adds a batch's gradient at the profile of the current optimiser step, and returns the loss to log."""
        self._choice = self._schedule.draw(self.state.global_step)
        # The means live in the optimiser's parameter group, so a checkpoint has them.
        self._running.means = self.optimizer.param_groups[0].setdefault("usual_losses", {})
        with use_profile(self.model, self._profiles[self._choice]):  # until the backward pass is done
            super().training_step(model, inputs, num_items_in_batch)
        return torch.tensor(self._losses[-1] / self.current_gradient_accumulation_steps, device=self.args.device)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The objective at the model's active profile; in a training step over the square root of its running mean."""
        batch: Batch = {name: value for name, value in inputs.items() if name not in self.label_names}
        in_step = model.training
        model.eval()
        with self.accelerator.autocast():  # the student has it already, except in an evaluation after training
            target, outputs = self._targets.of(None, batch), call_model(model, batch)
        loss, _ = self._targets.loss(outputs, target, batch)
        if in_step:
            loss = self._scaled(loss)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluates as the Trainer does; outside of training the model is then as it was before."""
        try:
            return super().evaluation_loop(*args, **options)
        finally:
            if not self.is_in_train:
                drop_autocast_(self.model)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Predicts as the Trainer does, and also computes the loss of rows without labels, which the Trainer omits."""
        loss, logits, labels = None, None, None
        if not prediction_loss_only:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is None:
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(inputs)).detach()
        return loss, logits, labels

    def _scaled(self, loss: Tensor) -> Tensor:
        value = float(self.accelerator.reduce(loss.detach(), "mean"))  # over processes, so all divide by the same
        require_finite(value, self.state.global_step, "loss")
        self._losses.append(value)
        return loss / loss_scale(value, self._running.mean(self._choice))

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Logs as the Trainer does, with the mean loss of each profile since the last log."""
        if "loss" in logs:
            means = {self._labels[choice]: sum(losses) / len(losses) for choice, losses in self._logged.items()}
            logs |= {f"loss_at_{label:g}": mean for label, mean in sorted(means.items())}
            self._logged.clear()
        super().log(logs, *args, **options)


def _check(args: transformers.TrainingArguments, options: Mapping[str, Any]) -> None:
    """Raises FlexrankError for settings of a Trainer that are not supported here."""
    if args.activation_checkpointing:
        raise FlexrankError("activation_checkpointing of the Trainer needs dropout on; distill_ has one of its own")
    if args.fp16:
        raise FlexrankError("fp16 of the Trainer loses small gradients; use bf16=True, or neither")
    if args.optim not in ADAMW:
        name = getattr(args.optim, "value", args.optim)
        raise FlexrankError(f"optim is {name!r}; the AdamW of consolidation is {' or '.join(ADAMW)}")
    given = options.get("optimizers") or (None, None)
    if any(one is not None for one in (*given, options.get("optimizer_cls_and_kwargs"))):
        right = "leave optimizers out, and set rate, betas, epsilon, decay and lr_scheduler_type in args"
        raise FlexrankError(
            f"the Trainer was given an optimiser or a scheduler, of parameters not trained here; {right}"
        )
