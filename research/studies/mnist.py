"""The networks of the paper's MNIST studies (FlexRank, sections 3.4 and C.3), and many submodels trained at once.

The paper gives no widths. Every layer here has ten ranks or more, so that K = 10 levels in ranks make 10⁴ submodels.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.data.batches import Batch
from flexrank.data.halves import Half, half_indices
from flexrank.distill.schedule import scheduled_rate
from flexrank.files import atomic_file
from flexrank.nn.switch import nested_layers
from flexrank.progress import track
from research.assets import assets_directory

LEVELS = 10
EPOCHS, BATCH, LEARNING_RATE = 4, 128, 2e-3


def build_network(name: str, seed: int) -> nn.Sequential:
    """Returns the untrained network, (N, 1, 28, 28) to (N, 10).

    `lenet` is the usual one (ranks 16, 32, 128, 10); `narrow` (10, 16, 32, 10) is so small, 22,000 multiply-adds per
    image, that all its submodels can be trained.
    """
    torch.manual_seed(seed)
    if name == "lenet":
        first = [nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU()]
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))
    first = [nn.Conv2d(1, 10, 5, stride=4), nn.ReLU(), nn.Conv2d(10, 16, 4, stride=2), nn.ReLU()]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load_images(split: str, half: Half = "reporting") -> tuple[Tensor, Tensor]:
    """Returns MNIST's images (N, 1, 28, 28), of mean 0 and deviation 1, and classes: of `train` or half of `test`."""
    with np.load(Path(assets_directory("mnist"), "mnist", f"{split}.npz"), allow_pickle=False) as file:
        images, labels = torch.from_numpy(file["x"]), torch.from_numpy(file["y"].astype(np.int64))
    rows = half_indices(half if split == "test" else None, images)
    return (images[rows].float().div(255).sub(0.1307) / 0.3081).unsqueeze(1), labels[rows]


def batches_of(images: Tensor, size: int = 500) -> list[Batch]:
    """Returns images in batches."""
    return list(images.split(size))


def draw_rows(count: int, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yields the rows of each step's batch, from a new permutation whenever the last has too few left."""
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < batch:
            order = torch.randperm(count, generator=generator)
        rows, order = order[:batch], order[batch:]
        yield rows


def train_network(name: str, images: Tensor, labels: Tensor, seed: int) -> nn.Sequential:
    """Returns the network trained on the labels by Adam with a cosine schedule, in eval mode."""
    model, steps = build_network(name, seed), EPOCHS * (len(images) // BATCH)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for rows in track(draw_rows(len(images), BATCH, steps, seed), f"training {name}, seed {seed}", steps):
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def kept_network(path: Path, name: str, images: Tensor, labels: Tensor, seed: int) -> nn.Sequential:
    """Returns the trained network of a file, written first if absent: another process's training has other bits."""
    if not path.is_file():
        with atomic_file(path) as aside:
            safetensors.torch.save_file(train_network(name, images, labels, seed).state_dict(), aside)
    model = build_network(name, seed)
    model.load_state_dict(safetensors.torch.load_file(path))
    return model.eval()


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Returns KL(teacher ‖ student) of logits (…, N, classes), averaged over the N images: (…)."""
    log_teacher, log_student = teacher.log_softmax(-1), student.log_softmax(-1)
    return (log_teacher.exp() * (log_teacher - log_student)).sum(-1).mean(-1)


class StackedNetwork(nn.Module):
    """M submodels of an elastic `narrow` network, each with its own weights: images (N, C, H, W) to logits (M, N, 10).

    Each layer is one batched product. A submodel's components beyond its rank are zero and get no gradient, so it is
    trained as it would be alone. Activations are (M, C, H, W, N): with N first, unfolding could not copy runs of N
    numbers, and two thirds of a step are copies.
    """

    def __init__(self, model: nn.Sequential, ranks: Sequence[Sequence[int]]):
        super().__init__()
        self.steps = [(type(module), getattr(module, "geometry", None)) for module in model]
        self.u, self.v, self.bias = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        self.masks: list[Tensor] = []
        for layer, own in zip(nested_layers(model).values(), torch.tensor(ranks).T, strict=True):
            mask = (torch.arange(layer.max_rank) < own[:, None]).float()[:, :, None]  # (M, k, 1)
            assert layer.bias is not None
            self.masks.append(mask)
            self.u.append(layer.u.detach() * mask)  # (M, k, m)
            self.v.append(layer.v.detach() * mask)  # (M, k, n)
            self.bias.append(layer.bias.detach().repeat(len(own), 1)[:, :, None])  # (M, m, 1)

    @torch.no_grad()
    def randomise_(self, seed: int) -> None:
        """Sets fresh weights: entries of each product U_r Vᵀ_r vary as in torch's own initialisation of a layer."""
        generator = torch.Generator().manual_seed(seed)
        for u, v, bias, mask in zip(self.u, self.v, self.bias, self.masks, strict=True):
            inputs = v.shape[2]
            scale = (1 / (3 * inputs * mask.sum(1, keepdim=True))) ** 0.25  # (M, 1, 1)
            for factor in (u, v):
                factor.copy_(torch.randn(factor.shape[1:], generator=generator) * scale * mask)
            bias.copy_((torch.rand(bias.shape[1:], generator=generator) * 2 - 1) / math.sqrt(inputs))

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        layers = iter(zip(self.u, self.v, self.bias, strict=True))
        values = images.permute(1, 2, 3, 0).unsqueeze(0)  # (1, C, H, W, N): shared until the first layer
        for kind, geometry in self.steps:
            if kind is nn.ReLU:
                values = values.relu()
            elif kind is nn.Flatten:
                values = values.flatten(1, -2)
            else:
                u, v, bias = next(layers)
                inputs = values if geometry is None else _Unfold.apply(values, geometry.kernel_size, geometry.stride)
                values = _product(u.transpose(1, 2) @ v, inputs.flatten(2), bias).unflatten(2, inputs.shape[2:])
        return values.transpose(1, 2)


def _product(weight: Tensor, inputs: Tensor, bias: Tensor) -> Tensor:
    """Multiplies (M, m, n) by (M, n, p), plus (M, m, 1); one product for all submodels that share inputs (1, n, p)."""
    if len(inputs) == 1:
        return (weight.flatten(0, 1) @ inputs[0]).unflatten(0, weight.shape[:2]) + bias
    return torch.baddbmm(bias, weight, inputs)


class _Unfold(torch.autograd.Function):
    """Unfolds (M, C, H, W, N) to patches (M, C·h·w, H', W', N); torch's own backward is three times slower here."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        ctx.kernel, ctx.stride, ctx.shape = kernel, stride, values.shape
        windows = values.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])  # (M, C, H', W', N, h, w)
        return windows.permute(0, 1, 5, 6, 2, 3, 4).flatten(1, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows, columns), (down, right), (height, width) = ctx.kernel, ctx.stride, gradient.shape[2:4]
        total = gradient.new_zeros(ctx.shape)
        parts = gradient.unflatten(1, (ctx.shape[1], rows, columns))
        for row in range(rows):
            for column in range(columns):
                window = total[:, :, row : row + down * height : down, column : column + right * width : right]
                window += parts[:, :, row, column]
        return total, None, None


def train_stacked_(
    network: StackedNetwork, images: Tensor, targets: Tensor, *, steps: int, learning_rate: float, warmup_steps: int,
    batch: int, seed: int
) -> None:  # fmt: skip
    """Trains every submodel in place on the teacher's logits (N, classes), by AdamW with warm-up and a cosine schedule.

    All submodels see the same batches, drawn by the seed; their losses are summed, so none affects another.
    """
    optimizer = torch.optim.AdamW(network.parameters(), learning_rate, weight_decay=0.0, fused=True)
    for step, rows in enumerate(draw_rows(len(images), batch, steps, seed)):
        optimizer.param_groups[0]["lr"] = scheduled_rate(step, steps, learning_rate, warmup_steps)
        student = network(images[rows]).log_softmax(-1)
        teacher = targets[rows].log_softmax(-1).expand_as(student)
        optimizer.zero_grad(set_to_none=True)
        (functional.kl_div(student, teacher, log_target=True, reduction="sum") / batch).backward()
        optimizer.step()
