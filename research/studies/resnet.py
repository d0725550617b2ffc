"""ResNet-20 for CIFAR-10 as it is printed (He et al. 2016, section 4.2), with shortcuts of no parameters (option A).

Its tensors have the names of the common PyTorch checkpoints.
"""

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.data.images import Scaling

#: What the checkpoint in the assets was trained with.
SCALING = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
WIDTHS, BLOCKS = (16, 32, 64), 3


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
        return functional.relu(hidden + shortcut(x, hidden.shape[1], self.stride))


class ResNet20(nn.Module):
    """Images (N, 3, 32, 32) to logits (N, 10): a convolution, three stages of three blocks, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(ResidualBlock(n, m, 1 if n == m else 2), *(ResidualBlock(m, m, 1) for _ in range(BLOCKS - 1)))
            for n, m in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False)
        )
        self.linear = nn.Linear(WIDTHS[-1], 10)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        hidden = functional.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(hidden))).mean((2, 3)))


def shortcut(x: Tensor, channels: int, stride: int) -> Tensor:
    """Option A: every `stride`-th pixel of (N, C, H, W), and channels of zeros, half of them before, half after."""
    missing = channels - x.shape[1]
    return functional.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, missing // 2, missing - missing // 2))


def load_resnet20(path: Path) -> ResNet20:
    """The network of a safetensors file, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        model = ResNet20()
    model.load_state_dict(safetensors.torch.load_file(path))
    return model.eval()
