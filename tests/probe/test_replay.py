"""What a probe keeps to replay it: nothing else stays in memory, within a bound that changes no error."""

import functools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tiny
from flexrank.distill import distillation_evaluator
from flexrank.distill.objectives import FeatureObjective
from flexrank.probe import probe_sensitivity
from flexrank.probe.replay import make_plan
from flexrank.profiles import SensitivityTable
from held import Held
from tiny import nest

WIDTH, ROWS, BATCHES = 6, 4, 2
SET = BATCHES * ROWS * WIDTH * 4  #: bytes of what a module returns in one evaluation
NO_BLOCKS, NO_MODULES = "probe: a block's outputs take more than", "probe: outputs of modules inside a block do not fit"


def stack(block: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Four blocks; the probes of a block's second layer need not run the first one, nor what is between."""
    block = block or (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(4))).eval()


def probed(model: nn.Module, max_bytes: int) -> tuple[SensitivityTable, Held]:
    """The table of a probe, and what was in memory meanwhile."""
    student = nest(model)
    batches = list(torch.randn(BATCHES, ROWS, WIDTH, generator=torch.Generator().manual_seed(0)))
    with Held(distillation_evaluator(stack(), batches, FeatureObjective())) as held:
        return probe_sensitivity(student, held.evaluate, 3, replay_bytes=max_bytes, matrix_bytes=0), held


@functools.cache
def unbounded() -> SensitivityTable:
    return probed(stack(), 2**30)[0]


@pytest.mark.parametrize(
    ("max_bytes", "most", "said"),
    [
        # Of the block before, while the next is recorded; of this one; and of a layer and a tanh inside the next.
        (4 * SET, 4 * SET, []), (4 * SET - 1, 3 * SET, []), (3 * SET, 3 * SET, []),
        (3 * SET - 1, 2 * SET, [NO_MODULES]), (2 * SET, 2 * SET, [NO_MODULES]), (2 * SET - 1, SET, [NO_MODULES]),
        (SET, SET, [NO_MODULES]), (SET - 1, 0, [NO_BLOCKS, NO_MODULES]), (0, 0, [NO_BLOCKS, NO_MODULES]),
    ],
)  # fmt: skip
def test_what_is_kept_is_within_the_bound_and_changes_no_error(
    max_bytes: int, most: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = unbounded()
    caplog.clear()
    with caplog.at_level(logging.INFO, "flexrank"):
        table, held = probed(stack(), max_bytes)
    assert table == wanted and held.most == most
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("probe:")]
    assert len(lines) == len(said) and all(line.startswith(start) for line, start in zip(lines, said, strict=True))
    assert (
        make_plan(nest(stack()), lambda model: model(torch.zeros(BATCHES * ROWS, WIDTH)), max_bytes).most_bytes()
        == most
    )


class Halved(nn.Module):
    """Returns a part of a larger tensor, all of whose memory it keeps from being freed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, :WIDTH]


class Named(nn.Module):
    """Returns what no bound can be held for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: object) -> object:
        return Box(self.linear(x.tensor if isinstance(x, Box) else x))


class Box:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class Unboxing(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tensor


@pytest.mark.parametrize(("max_bytes", "most"), [(2**30, 4 * SET), (2 * SET, 2 * SET), (2 * SET - 1, 0)])
def test_a_view_counts_with_all_its_memory(max_bytes: int, most: int) -> None:
    assert probed(stack(Halved), max_bytes)[1].most == most


def test_what_has_no_known_size_is_not_kept() -> None:
    assert probed(Unboxing(*stack(Named)), 2**30)[1].most == 0


@pytest.mark.parametrize("stops", [False, True])
def test_a_model_that_reads_its_own_tokens_is_probed_without_replay(
    stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Truncated it writes others, of which earlier modules return something else; one that stops there is replayed."""
    model, start = tiny.elastic("llama_untied"), torch.arange(3, 11).reshape(2, 4)
    wanted: list[torch.Tensor] = []

    def evaluate(model: nn.Module) -> float:
        tokens, losses = start, []
        for _ in range(5):
            logits = model(input_ids=tokens, use_cache=False).logits
            losses.append(float(logits[:, -1].logsumexp(-1).sum()))
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
            if stops and wanted and not torch.equal(tokens, wanted[0][:, : tokens.shape[1]]):
                break
        wanted.append(tokens)
        return sum(losses)

    with caplog.at_level(logging.INFO, "flexrank"):
        table = probe_sensitivity(model, evaluate, 3, min_saving=0)
    assert caplog.text.count("the model reads what it has written; all modules run for every probe") == (not stops)
    assert table == probe_sensitivity(model, evaluate, 3, min_saving=0, replay_bytes=0)


def test_a_model_that_is_called_once_more_is_probed_without_replay() -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    full = stack()(x)

    def evaluate(model: nn.Module) -> float:
        is_full = torch.allclose(model(x), full, rtol=1e-3, atol=1e-5)
        return 0.0 if is_full else float(model(2 * x).square().sum())

    table = probe_sensitivity(nest(stack()), evaluate, 3, min_saving=0)
    assert table == probe_sensitivity(nest(stack()), evaluate, 3, min_saving=0, replay_bytes=0)


class Pyramid(nn.Module):
    """Stages that halve the width; heads read every stage's output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(n, n // 2), nn.Tanh()) for n in (32, 16, 8))
        self.heads = nn.ModuleList(nn.Linear(n, 4) for n in (16, 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.zeros(len(x), 4)
        for stage, head in zip(self.stages, self.heads, strict=True):
            outputs = outputs + head(x := stage(x))
        return outputs


def test_a_model_that_reads_the_output_of_every_block_is_probed() -> None:
    evaluate = distillation_evaluator(Pyramid(), [torch.randn(8, 32)], FeatureObjective())
    table = probe_sensitivity(nest(Pyramid()), evaluate, 3, min_saving=0)
    assert table == probe_sensitivity(nest(Pyramid()), evaluate, 3, min_saving=0, replay_bytes=0)


class Shared(nn.Module):
    """Blocks of which the last attends to keys that the first left in the model, as some Gemmas do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.left = nn.ModuleList(Attending(self) for _ in range(3)), dict[str, torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, block is self.blocks[0], block is self.blocks[2])
        return x


class Attending(nn.Module):
    def __init__(self, model: Shared) -> None:
        super().__init__()
        self.attention, self.last = Attention(model), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, leaves: bool, reads: bool) -> torch.Tensor:
        return x + self.last((x + self.attention(x, leaves, reads)).tanh())


class Attention(nn.Module):
    def __init__(self, model: Shared) -> None:
        super().__init__()
        self.q, self.o, self.of = nn.Linear(8, 8), nn.Linear(8, 8), [model]

    def forward(self, x: torch.Tensor, leaves: bool, reads: bool) -> torch.Tensor:
        left = self.of[0].left
        if leaves:
            left["keys"] = x
        q = self.q(x)
        return self.o((q @ left["keys"].mT).softmax(-1) @ left["keys"] if reads else q.tanh())


def test_blocks_that_read_what_earlier_ones_left_are_probed_without_replay() -> None:
    """Replaying the attention, before its block's last layer, gives the baseline; replaying only blocks does not."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 5, 8, generator=generator) for _ in range(3)]
    evaluate = distillation_evaluator(Shared(), batches, FeatureObjective())
    table = probe_sensitivity(nest(Shared()), evaluate, 3, min_saving=0)
    assert table == probe_sensitivity(nest(Shared()), evaluate, 3, min_saving=0, replay_bytes=0)


def test_modules_that_return_complex_numbers_are_probed() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x)

    class Real(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.real

    model = nest(nn.Sequential(nn.Linear(WIDTH, WIDTH), Spectrum(), Real(), nn.Linear(WIDTH, WIDTH)).eval())
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    table = probe_sensitivity(model, lambda model: float(model(x).square().mean()), 3)
    assert table == probe_sensitivity(model, lambda model: float(model(x).square().mean()), 3, replay_bytes=0)
