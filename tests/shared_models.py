"""The data, and the networks of experts, that several processes share (`shared_work`)."""

import torch
from torch import Tensor, nn

from tiny import VOCABULARY, nest


def texts(count: int, rows: int = 3) -> list[dict[str, Tensor]]:
    """Batches of random tokens, each with another row that ends in padding."""
    batches = []
    for seed in range(count):
        ids = torch.randint(3, VOCABULARY, (rows, 10), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[seed % rows, 6:] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return batches


def images(count: int, rows: int) -> list[Tensor]:
    return [torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def vectors(count: int, rows: int) -> list[Tensor]:
    return [torch.randn(rows, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


class Routed(nn.Module):
    """Two experts, of which each row reaches one: a process's rows may leave one of them out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.last = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        out, is_second = torch.zeros_like(x), x[:, 0] < 0
        for rows, expert in zip((~is_second, is_second), self.experts, strict=True):
            if rows.any():
                out = out.index_add(0, rows.nonzero().flatten(), expert(x[rows]))
        return self.last(out)


def routed() -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """Student, teacher and batches whose first three rows reach one expert, the other four the other."""
    batches = vectors(3, 7)
    for batch in batches:
        batch[:, 0] = torch.tensor([1.0] * 3 + [-1.0] * 4)
    return nest(Routed()), Routed(), batches


class RoutedBlock(Routed):
    """As wide as what it reads; the first column, which says which expert a row reaches, stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :6], super().forward(x)], 1)


class RoutedBlocks(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
