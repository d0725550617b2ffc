"""What the integer program's solver prints is discarded."""

import os

import pytest
from tables import allocate_ranks, random_table, transformer_table


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS has a line of its own for this table, for each budget."""
    allocate_ranks(transformer_table(112, 10, seed=0), [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert capfd.readouterr().out == ""


def test_a_closed_standard_output_is_no_error() -> None:
    wanted = allocate_ranks(random_table(2, 3, 0), [0.7])
    kept = os.dup(1)
    os.close(1)
    try:
        assert allocate_ranks(random_table(2, 3, 0), [0.7]) == wanted
    finally:
        os.dup2(kept, 1)
        os.close(kept)
