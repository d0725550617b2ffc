"""The consolidation bench at a tiny size: ratios are those of the seconds, and its verdicts follow from them."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flexrank.deployment.process import in_fresh_process
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers
from research.benches import train
from research.experiment import Request

LLAMA = train.LLAMA | {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 56, "vocab_size": 64}
TINY = train.Subject("tiny", "language", LLAMA, 2, 16)


def in_turn(runs: Sequence[Callable[[], object]], repeats: int, warmup: int) -> list[list[float]]:
    """Runs each once, and says that the n-th took n seconds, but for one round that was slow."""
    for run in runs:
        run()
    return [[float(number), 100.0, float(number)] for number in range(1, len(runs) + 1)]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The whole bench, on one small model in one dtype, but for its times and two of its three peaks of memory."""

    def peak(function: Callable[..., int], *arguments: Any) -> int:
        return in_fresh_process(function, *arguments) if arguments[-1] == "full" else 10**8

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "in_fresh_process", peak)
        for name, value in {"SUBJECTS": (TINY,), "REPEATS": 3, "DTYPES": ("float32",), "interleave": in_turn}.items():
            patch.setattr(train, name, value)
        return train.run(Request(tmp_path_factory.mktemp("work")))


def test_ratios_are_those_of_what_was_measured(result: dict) -> None:
    """The teacher takes 1 second, the dense step 2, and those of the elastic student, one profile after another, 3…"""
    assert json.loads(json.dumps(result)) == result
    cells = [cell for one in result["tables"] for row in one["rows"] for cell in row[1:]]
    assert len(result["tables"]) == 3 and all(math.isfinite(cell) and cell > 0 for cell in cells)
    (row,) = result["data"]["rows"]
    seconds = [3, *range(3, 11)]  # budget 1 is timed by itself
    assert row["fresh"] == [(one + 1) / (2 + 1) for one in seconds] and row["dense_fresh"] == 3
    assert row["kept"] == [one / 2 for one in seconds] and row["dense_kept"] == 2
    assert row["mean_kept"] == 6.5 / 2 and row["mean_fresh"] == 7.5 / 3
    dense, *elastic = (row["memory"][key] for key in ("dense", "trained", "full"))
    assert [row["memory_ratio"], row["memory_ratio_full"]] == [one / dense for one in elastic]
    train.draw(result["data"])


@pytest.mark.parametrize(("slowest", "largest", "met"), [(1.15, 1.6, True), (1.16, 1.61, False)])
def test_verdicts_are_of_the_worst(slowest: float, largest: float, met: bool) -> None:
    worst = {"mean_fresh": slowest, "mean_kept": slowest, "memory_ratio": largest, "memory_ratio_full": largest}
    rows = [
        {"subject": "best", "dtype": "float32"} | dict.fromkeys(worst, 1.0),
        {"subject": "worst", "dtype": "x"} | worst,
    ]
    expected = [(met, f"{value:.2f} at worst (worst, x)") for value in worst.values()]
    assert [(one["holds"], one["here"]) for one in train._claims(rows)] == expected


@torch.no_grad()
def test_students_have_random_matrices_of_the_teachers_mean_square() -> None:
    teacher = train.build(TINY)
    dense, elastic = (train.random_copy(teacher, "language", is_elastic) for is_elastic in (False, True))
    for name, layer in select_layers(teacher).items():
        weight, factors = weight_matrix(layer), nested_layers(elastic)[name]
        for matrix in (weight_matrix(dense.get_submodule(name)), factors.u.T @ factors.v):
            assert float(matrix.square().mean() / weight.square().mean()) == pytest.approx(1, rel=0.25)
            assert abs(float((matrix * weight).mean() / weight.square().mean())) < 0.2
