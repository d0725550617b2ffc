"""A small vision transformer for CIFAR-10, trained from scratch on a CPU: what the study `vision` compresses.

Activations are bfloat16, and the network has four layers of 128 and two heads, since reading and writing activations is
the greater part of a step: 600 images a second on one core.
"""

import dataclasses
import math
import shutil
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from flexrank.data.images import Scaling, channels_first, read_images
from flexrank.distill.schedule import Feed, scheduled_rate
from flexrank.distill.state import State
from flexrank.errors import FlexrankError
from flexrank.files import directory_aside, write_json
from flexrank.hf.models import eager_attention, save_model
from flexrank.progress import track
from flexrank.run.stages import autocast_dtype
from research.measures import AlteredBatches, accuracy

TRAIN, TEST = "train_jpg.npz", "test_jpg.npz"
RECORD = "training.json"
#: Of CIFAR-10's training images.
SCALING = Scaling((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The network and its training: AdamW that decays matrices alone, smoothed labels, a cosine schedule."""

    epochs: int = 16
    batch_size: int = 128
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    max_norm: float = 1.0
    hidden: int = 128
    layers: int = 4
    heads: int = 2
    feed_forward: int = 384
    patch: int = 4
    seed: int = 0


def train_vit(images: Path, output: Path, recipe: Recipe | None = None) -> dict[str, Any]:
    """Trains the network on train_jpg.npz of `images`, and writes it with its scaling and record to `output`.

    From a checkpoint beside `output`, written after each epoch, training goes on to the same bits.

    Returns:
        training.json: the recipe, the mean loss of each epoch, and the accuracy on the test images.

    Raises:
        FlexrankError: the recipe, the images, `output` or a checkpoint of another recipe do not allow it.
    """
    recipe = recipe or Recipe()
    for name in ("epochs", "batch_size"):
        if getattr(recipe, name) < 1:
            raise FlexrankError(f"{name} is {getattr(recipe, name)}; it must be at least 1")
    if not 0 < recipe.learning_rate < math.inf:
        raise FlexrankError(f"learning_rate is {recipe.learning_rate:g}; it must be a number above 0")
    pixels, labels = read_tensors(images / TRAIN)
    test_pixels, test_labels = read_tensors(images / TEST)
    model = _build_vit(recipe, pixels.shape[-1], int(labels.max()) + 1)
    batches = AlteredBatches(pixels, SCALING, recipe.batch_size, recipe.seed)
    checkpoint = output.with_name(f"{output.name}.partial")
    with eager_attention(model):
        losses = _train(model, batches, labels, recipe, checkpoint)
    reached = accuracy(model.eval(), scaled_batches(test_pixels, SCALING), test_labels)
    record = {"accuracy": reached, "recipe": dataclasses.asdict(recipe), "losses": losses}
    with directory_aside(output, RECORD) as aside:
        save_model(model, aside)
        write_json(aside / "preprocessor_config.json", SCALING.to_json())
        write_json(aside / RECORD, record)
    shutil.rmtree(checkpoint)
    return record


def _build_vit(recipe: Recipe, side: int, classes: int) -> Any:
    """The untrained network for RGB images of this side; the same weights for the same seed."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=recipe.hidden, num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, image_size=side,
        intermediate_size=recipe.feed_forward, patch_size=recipe.patch, num_labels=classes,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return ViTForImageClassification(config).train()


def read_tensors(path: Path) -> tuple[Tensor, Tensor]:
    """Images, uint8 (N, C, H, W), and classes (N,) of a file."""
    images, labels = read_images(path)
    return channels_first(images), torch.from_numpy(labels)


def scaled_batches(images: Tensor, scaling: Scaling, size: int = 250) -> Iterable[Tensor]:
    """Images, uint8 (N, C, H, W), in order and as the model reads them, by batches (B, C, H, W)."""
    return (scaling(part) for part in images.split(size))


def _train(model: nn.Module, batches: AlteredBatches, labels: Tensor, recipe: Recipe, checkpoint: Path) -> list[float]:
    """Trains in place; returns the mean loss of each epoch."""
    parameters = dict(model.named_parameters())
    dtype = autocast_dtype("auto", torch.device("cpu")) or torch.float32
    matrices, others = ([p for p in parameters.values() if (p.ndim in (2, 4)) is wanted] for wanted in (True, False))
    decays = ((matrices, recipe.weight_decay), (others, 0.0))
    groups = [{"params": values, "weight_decay": decay} for values, decay in decays]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, fused=True)
    settings = dataclasses.asdict(recipe) | {"dtype": str(dtype), "images": len(labels)}
    feed = Feed(batches, recipe.seed)
    state = State(checkpoint, settings, parameters, optimizer, feed)
    epoch, steps = batches.per_pass, recipe.epochs * batches.per_pass
    for step in track(range(state.step, steps), "training the vision transformer", steps, state.step):
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(step, steps, recipe.learning_rate, round(recipe.warmup * steps), 0.0)
        _, pixels = feed.next()
        assert isinstance(pixels, Tensor)
        # All activations in bfloat16, the residual stream too, of float32 weights: under autocast a step copies more.
        rounded = {name: value.to(dtype) for name, value in parameters.items()}
        logits = functional_call(model, rounded, (pixels.to(dtype),)).logits
        target = labels[batches.rows(step)]
        loss = functional.cross_entropy(logits.float(), target, label_smoothing=recipe.label_smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters.values(), recipe.max_norm, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.advance(float(loss.detach()), 0)
        if state.step % epoch == 0:
            state.save()
    return [statistics.fmean(state.losses[start : start + epoch]) for start in range(0, steps, epoch)]
