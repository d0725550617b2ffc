"""The consolidation bench at a tiny size: numbers are there and finite, and its verdicts follow from them."""

import copy
import json
import math

import pytest

from research.benches import train
from research.experiment import Request

TINY = train.Subject("tiny", "language", "random", 2, 16, (1, 32, 48, 64))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The whole bench, on one small model in one dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "SUBJECTS", (TINY,))
        patch.setattr(train, "REPEATS", 1)
        patch.setattr(train, "DTYPES", ("float32",))
        return train.run(Request(tmp_path_factory.mktemp("work")))


def test_every_number_is_there_and_finite(result: dict) -> None:
    assert json.loads(json.dumps(result)) == result
    cells = [cell for one in result["tables"] for row in one["rows"] for cell in row[1:]]
    assert len(result["tables"]) == 4 and all(math.isfinite(cell) and cell > 0 for cell in cells)
    (row,) = result["data"]["rows"]
    assert result["data"]["budgets"][0] == 1 and len(row["fresh"]) == len(row["kept"]) == 9
    assert row["mean_kept"] == pytest.approx(sum(row["kept"][1:]) / 8)
    assert row["memory_ratio"] == row["memory"]["trained"] / row["memory"]["dense"]
    train.draw(result["data"])


def test_verdicts_follow_from_the_numbers(result: dict) -> None:
    (row,) = result["data"]["rows"]
    numbers = ("mean_fresh", "mean_kept", "memory_ratio", "memory_ratio_full")
    goals = (train.TIME_GOAL, train.TIME_GOAL, train.MEMORY_GOAL, train.MEMORY_GOAL)
    assert [one["holds"] for one in result["claims"]] == [row[key] <= g for key, g in zip(numbers, goals, strict=True)]
    worst = copy.deepcopy(row) | {"subject": "slow"} | dict.fromkeys(numbers, 9.0)
    assert [(one["holds"], one["here"]) for one in train._claims([row, worst])] == 4 * [
        (False, "9.00 at worst (slow, float32)")
    ]
    best = row | dict.fromkeys(numbers, 1.0)
    assert all(one["holds"] for one in train._claims([best]))


def test_operations_of_a_dense_step_are_counted() -> None:
    """Oracle: 2 a multiply-add; forward once, backward twice; the tied head and embeddings are frozen."""
    setting = train._Setting(TINY, "float32")
    tokens, (layers, width, inner, vocabulary) = 2 * 16, TINY.shape
    matrices = layers * (width * width * 2 + 2 * width * width // 2 + 3 * width * inner)
    with setting.step(setting.dense) as (step, trained):
        assert trained == matrices + (2 * layers + 1) * width
        counted = train.operations(step)
    products = 2 * tokens * (3 * matrices + 2 * width * vocabulary)
    first_inputs = 2 * tokens * 2 * width * width  # of q, k, v of the first layer: nothing before them needs them
    heads = 2 * 2 * 2 * 16 * 16 * width
    assert products + heads * 2 <= counted <= products + heads * 5 + first_inputs
