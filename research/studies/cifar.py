"""The networks of the study `vision` on CIFAR-10, and its images: ResNet-20, and a vision transformer, trained here.

ResNet-20 is as published (He et al. 2016, section 4.2), with parameter-free shortcuts (option A). The transformer has
four layers of width 128 and two heads. Its activations are in bfloat16, because reading and writing them is the greater
part of a step: 600 images per second on one core.
"""

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from flexrank.data.images import Scaling, channels_first, read_images
from flexrank.distill.schedule import Feed, scheduled_rate
from flexrank.distill.state import State
from flexrank.files import directory_aside, write_json
from flexrank.hf.models import eager_attention, save_model
from flexrank.progress import track
from flexrank.run.training import autocast_dtype
from research.measures import AlteredBatches, accuracy

TRAIN, TEST = "train_jpg.npz", "test_jpg.npz"
RECORD = "training.json"
#: For the transformer, that of CIFAR-10's training images; then the scaling of ResNet-20's checkpoint in the assets.
SCALING = Scaling((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
RESNET_SCALING = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def read_tensors(path: Path) -> tuple[Tensor, Tensor]:
    """Returns a file's images, uint8 (N, C, H, W), and classes (N,)."""
    images, labels = read_images(path)
    return channels_first(images), torch.from_numpy(labels)


def scaled_batches(images: Tensor, scaling: Scaling) -> Iterable[Tensor]:
    """Returns images, uint8 (N, C, H, W), in order and as the model reads them, in batches (B, C, H, W)."""
    return map(scaling, images.split(250))


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut: (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        hidden = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        half = (hidden.shape[1] - x.shape[1]) // 2  # option A: half of the zero channels before, half after
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        return functional.relu(hidden + shortcut)


class ResNet20(nn.Module):
    """Maps images (N, 3, 32, 32) to logits (N, 10); its tensors are named as in the common PyTorch checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(ResidualBlock(n, m, 1 if n == m else 2), ResidualBlock(m, m, 1), ResidualBlock(m, m, 1))
            for n, m in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        hidden = functional.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(hidden))).mean((2, 3)))


def load_resnet20(path: Path) -> ResNet20:
    """Returns the network of a safetensors file, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        model = ResNet20()
    model.load_state_dict(safetensors.torch.load_file(path))
    return model.eval()


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The transformer and its training: AdamW with decay on matrices only, label smoothing, a cosine schedule."""

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


def train_vit(images: Path, output: Path, recipe: Recipe) -> dict[str, Any]:
    """Trains the transformer on train_jpg.npz of `images`, and writes it with its scaling and record to `output`.

    Returns the record, training.json: the recipe, and the accuracy on the test images. After an interruption the same
    call resumes from a checkpoint beside `output`, written after each epoch, and ends at the same bits.
    """
    pixels, labels = read_tensors(images / TRAIN)
    test_pixels, test_labels = read_tensors(images / TEST)
    model = _build_vit(recipe, pixels.shape[-1], int(labels.max()) + 1)
    batches = AlteredBatches(pixels, SCALING, recipe.batch_size, recipe.seed)
    checkpoint = output.with_name(f"{output.name}.partial")
    with eager_attention(model):
        _train(model, batches, labels, recipe, checkpoint)
    reached = accuracy(model.eval(), scaled_batches(test_pixels, SCALING), test_labels)
    record = {"accuracy": reached, "recipe": dataclasses.asdict(recipe)}
    with directory_aside(output, RECORD) as aside:
        save_model(model, aside)
        write_json(aside / "preprocessor_config.json", SCALING.to_json())
        write_json(aside / RECORD, record)
    shutil.rmtree(checkpoint)
    return record


def _build_vit(recipe: Recipe, side: int, classes: int) -> Any:
    """Returns the untrained network for RGB images of this side; the same seed gives the same weights."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=recipe.hidden, num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, image_size=side,
        intermediate_size=recipe.feed_forward, patch_size=recipe.patch, num_labels=classes,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return ViTForImageClassification(config).train()


def _train(model: nn.Module, batches: AlteredBatches, labels: Tensor, recipe: Recipe, checkpoint: Path) -> None:
    parameters = dict(model.named_parameters())
    dtype = autocast_dtype("auto", torch.device("cpu")) or torch.float32
    matrices, others = ([p for p in parameters.values() if (p.ndim in (2, 4)) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, fused=True)
    feed, steps = Feed(batches, recipe.seed), recipe.epochs * batches.per_pass
    state = State(checkpoint, dataclasses.asdict(recipe) | {"dtype": str(dtype)}, parameters, optimizer, feed)
    for step in track(range(state.step, steps), "training the vision transformer", steps, state.step):
        pixels: Any = feed.next()[1]
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(step, steps, recipe.learning_rate, round(recipe.warmup * steps))
        # All activations, also the residual stream, are bfloat16 and weights float32: autocast copies more in a step.
        rounded = {name: value.to(dtype) for name, value in parameters.items()}
        logits = functional_call(model, rounded, (pixels.to(dtype),)).logits.float()
        loss = functional.cross_entropy(logits, labels[batches.rows(step)], label_smoothing=recipe.label_smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters.values(), recipe.max_norm, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.advance(float(loss.detach()), 0)
        if state.step % batches.per_pass == 0:
            state.save()
