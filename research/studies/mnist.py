"""The networks of the paper's MNIST studies: two convolutions, two linear layers (FlexRank, sections 3.4 and C.3).

The paper gives no widths. Every layer here has ten ranks or more, so that K = 10 levels in ranks make 10⁴ submodels.
"""

from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.data.batches import Batch
from flexrank.distill.objectives import LogitObjective
from flexrank.files import write_aside
from flexrank.progress import track
from research.assets import assets_directory
from research.studies.stacked import draw_rows

LEVELS = 10
EPOCHS, BATCH, LEARNING_RATE = 4, 128, 2e-3
OBJECTIVE = LogitObjective()


def build_network(name: str, seed: int) -> nn.Sequential:
    """The untrained network: (N, 1, 28, 28) to (N, 10).

    `lenet` is the customary one (ranks 16, 32, 128, 10); `narrow` (10, 16, 32, 10) is so small, 22,000 multiply-adds
    per image, that all its submodels can be trained.
    """
    torch.manual_seed(seed)
    if name == "lenet":
        first = [nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU()]
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))
    first = [nn.Conv2d(1, 10, 5, stride=4), nn.ReLU(), nn.Conv2d(10, 16, 4, stride=2), nn.ReLU()]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load_images(split: str) -> tuple[Tensor, Tensor]:
    """MNIST's `train` (60,000) or `test` (10,000) images (N, 1, 28, 28), of mean 0 and deviation 1, and classes."""
    with np.load(Path(assets_directory("mnist"), "mnist", f"{split}.npz"), allow_pickle=False) as file:
        images, labels = torch.from_numpy(file["x"]), torch.from_numpy(file["y"].astype(np.int64))
    return (images.float().div(255).sub(0.1307) / 0.3081).unsqueeze(1), labels


def train_network(name: str, images: Tensor, labels: Tensor, seed: int) -> nn.Sequential:
    """The network trained on the labels by Adam with a cosine schedule, in eval mode."""
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
    """The trained network of a file, written first where it is absent: another process's training has other bits."""
    if not path.is_file():
        model = train_network(name, images, labels, seed)
        with write_aside(path) as aside:
            safetensors.torch.save_file(model.state_dict(), aside)
    model = build_network(name, seed)
    model.load_state_dict(safetensors.torch.load_file(path))
    return model.eval()


def batches_of(images: Tensor, size: int = 500) -> list[Batch]:
    """Images in batches."""
    return list(images.split(size))


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ student) of logits (…, N, classes), a mean over the N images: (…)."""
    log_teacher, log_student = teacher.log_softmax(-1), student.log_softmax(-1)
    return (log_teacher.exp() * (log_teacher - log_student)).sum(-1).mean(-1)
