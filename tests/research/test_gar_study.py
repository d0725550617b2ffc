"""The study of gauge alignment: the pivoted peer against U Vᵀ, costs counted by hand, the whole on a tiny model."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from flexrank.errors import FlexrankError
from flexrank.nn.alignment import alignment_error
from flexrank.nn.gauge_aligned import GaugeAlignedLinear
from flexrank.run.config import parse_config
from research.baselines.pivoted import PivotedLinear, pivoted_order
from research.studies import find_study, gar, gar_cost
from research.studies.driver import reproduce
from research.studies.study import Request
from tiny_runs import settings


def factors(m: int, n: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, rank, dtype=torch.float64), torch.randn(n, rank, dtype=torch.float64)


@pytest.mark.parametrize("m, n, rank", [(12, 9, 5), (9, 12, 8), (7, 7, 1)])
def test_the_pivoted_layer_is_u_v_transposed(m: int, n: int, rank: int) -> None:
    u, v = factors(m, n, rank)
    layer = PivotedLinear.from_factors(u, v, torch.float64)
    x = torch.randn(2, 3, n, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ v @ u.T, rtol=1e-11, atol=1e-11)
    assert sum(p.numel() for p in layer.parameters()) == rank * (m + n - rank)
    assert sorted([*layer.pivots.tolist(), *layer.rest.tolist()]) == list(range(m))


def test_pivoting_takes_the_rows_that_stand_out_and_repairs_a_singular_leading_block() -> None:
    u, v = factors(10, 8, 3)
    u[:3] *= 1e-7
    u[1] = u[0]  # the leading block is singular: the paper's form divides by nothing
    order = pivoted_order(u)
    assert sorted(order.tolist()) == list(range(10)) and not set(order[:3].tolist()) & {0, 1, 2}
    lengths = u.norm(dim=1)
    assert order[0] == lengths.argmax()  # the first pivot is the longest row
    x = torch.randn(20, 8)
    for dtype in (torch.float32, torch.bfloat16):
        assert not alignment_error(u, v, 0, x, dtype) < 0.5
        assert alignment_error(u[order], v, 0, x, dtype) < 10 * alignment_error(u, v, 3, x, dtype)


def error_by_input(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The root mean square of each row's relative error, by a loop; a short row's is over a tenth of the median one."""
    least = float(exact.norm(dim=1).median()) / 10
    ratios = [float((a - b).norm()) / max(float(b.norm()), least) for a, b in zip(found, exact, strict=True)]
    return math.sqrt(sum(ratio**2 for ratio in ratios) / len(ratios))


def test_the_study_judges_the_pivoted_layer_as_it_runs() -> None:
    """`alignment_error` on permuted rows is the error of the layer that puts them back."""
    u, v = factors(24, 16, 7)
    x = torch.randn(50, 16).bfloat16()
    exact = x.double() @ v @ u.T
    layer = PivotedLinear.from_factors(u, v, torch.bfloat16)
    with torch.no_grad():
        error = error_by_input(layer(x).double(), exact)
    assert error == pytest.approx(alignment_error(u[pivoted_order(u)], v, 0, x, torch.bfloat16), rel=1e-6)


def test_counted_costs_are_the_parameters_of_the_timed_layers() -> None:
    for form in gar_cost.FORMS:
        rank = gar_cost.rank_at(0.75, 64)
        layer = gar_cost.random_layer(form, 64, rank, 0.125, "cpu", torch.float32)
        stored = sum(p.numel() for p in layer.parameters())
        assert gar_cost.counted_cost(form, 64, 0.75, 0.125) == stored / 64**2
        assert layer(torch.randn(3, 64)).shape == (3, 64)
    assert gar_cost.counted_cost("plain", 100, 0.97, 0.1) == pytest.approx(0.97 * 2)
    assert gar_cost.counted_cost("paper", 100, 0.97, 0.1) == pytest.approx(0.97 * 1.03)
    assert gar_cost.counted_cost("ours", 100, 0.5, 0.1) == pytest.approx(0.5 * 1.55)
    assert gar_cost.rank_at(0.97, 16) == 15 and gar_cost.rank_at(0.01, 16) == 1


def request_for(sources: Path, work: Path, **options: Any) -> Request:
    config = parse_config(settings(sources / "language", sources / "text.txt", work / "run"))
    return Request(work, config=config, **options)


@pytest.fixture
def subject(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gar._Subject]:
    """A tiny language model, decomposed once; the study is made small, and finds it ready."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its products are too small to share
    found = gar._decomposed(request_for(sources, tmp_path))
    monkeypatch.setattr(gar, "QUICK", (32, 8))
    for module in (gar, gar_cost):
        monkeypatch.setattr(module, "SHARES", (0.25, 0.75))
    for module in (gar, gar_cost):
        monkeypatch.setattr(module, "devices_of", lambda wanted: ["cpu"])
        monkeypatch.setattr(module, "can_compile", lambda device: True)
    monkeypatch.setattr(gar_cost, "_compiled_ratio", lambda *_: 0.5)  # four graphs take longer than all else here
    monkeypatch.setattr(gar, "_decomposed", lambda _: found)
    yield found
    torch.set_num_threads(threads)


def worst_plain_error(subject: gar._Subject) -> float:
    """In bfloat16, of the deployed layers themselves, a rank at a time."""
    worst = 0.0
    for name, layer in subject.layers.items():
        for rank in {gar_cost.rank_at(share, layer.max_rank) for share in gar_cost.SHARES}:
            u, v, x = layer.u[:rank].T.double(), layer.v[:rank].T.double(), subject.unseen[name].bfloat16()
            plain = GaugeAlignedLinear.from_factors(u, v, slack=rank, dtype=torch.bfloat16)
            exact = x.double() @ v @ u.T
            worst = max(worst, error_by_input(plain(x).double(), exact))
    return worst


@torch.no_grad()
def test_the_whole_study_on_a_tiny_model(
    sources: Path, tmp_path: Path, subject: gar._Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, request = find_study("gar"), request_for(sources, tmp_path / "work", seeds=2)
    result = reproduce(study, request, tmp_path, "flexrank reproduce gar")
    cost, parts, errors = result["tables"]
    assert len(cost["rows"]) == 2 * 2 * 4 and len(errors["rows"]) == 3 * 4
    assert all(cell["n"] == 2 and cell["mean"] > 0 for row in cost["rows"][::2] for cell in row[1:])
    assert cost["rows"][1][1:] == [0.5, 1.5]
    assert cost["rows"][3][1:] == [8 * 56 / 1024, 24 * 40 / 1024]
    assert len(parts["rows"]) == 2 * 8 and parts["rows"][3][1:] == [8 * 24 / 1024, 24 * 8 / 1024]
    places = ((cost, 2), (parts, 0), (parts, 2), (parts, 4))
    for whole, first, second, rest in zip(*(one["rows"][row][1:] for one, row in places), strict=True):
        assert whole["mean"] == pytest.approx(first["mean"] + second["mean"] + rest)
    half = result["data"]["errors"]["bfloat16"]
    assert half["plain"]["most"] == pytest.approx(worst_plain_error(subject), rel=1e-6)
    assert half["ours"]["ranks"] == 2 * len(subject.layers) == 30
    assert (tmp_path / "gar.png").stat().st_size > 10_000 and (tmp_path / "gar.svg").is_file()
    figure = study.draw(result["data"])
    assert isinstance(figure, Figure) and len(figure.axes) == 3
    for module, part in ((gar, "_decomposed"), (gar_cost, "_time")):  # the finished is neither loaded nor timed again
        monkeypatch.setattr(module, part, lambda *_: pytest.fail("done before"))
    assert study.run(request)["data"] == result["data"]


def test_slack_is_chosen_on_other_activations_than_errors_are_measured_on(subject: gar._Subject) -> None:
    name, layer = list(subject.layers.items())[-2]  # deep enough that a row depends on its whole text
    seen, unseen = (part[name] for part in (subject.seen, subject.unseen))
    assert seen.shape[1] == unseen.shape[1] == layer.matrix_shape[1]
    same = (torch.cdist(unseen.double(), seen.double()).min(1).values < 1e-6).float().mean()
    assert same < 0.2  # a block's first token alone looks like that of another


def row(share: float, dtype: str, **errors: float) -> dict[str, Any]:
    condition = {"paper": 100 * share, "pivoted": None}
    return {"layer": "a", "share": share, "dtype": dtype, "rank": 10, "slack": 2, "condition": condition, **errors}


def test_summaries_count_the_bound_and_tell_an_overflow() -> None:
    inf = float("inf")
    rows = [
        row(0.1, "bfloat16", plain=0.01, paper=0.031, pivoted=0.02, ours=0.02),
        row(0.5, "bfloat16", plain=0.01, paper=inf, pivoted=0.03, ours=0.01),
        row(0.9, "bfloat16", plain=inf, paper=inf, pivoted=inf, ours=inf),
        row(0.1, "float32", plain=1e-8, paper=1.9e-6, pivoted=1e-8, ours=1e-8),  # below the floor
        row(0.1, "float16", plain=0.01, paper=0.01, pivoted=0.01, ours=0.01),
    ]
    found = gar._summaries(rows)
    half, single = found["bfloat16"], found["float32"]
    assert {form: one["within"] for form, one in half.items()} == {"plain": 2, "paper": 0, "pivoted": 2, "ours": 2}
    assert half["paper"]["worst_times"] is None and half["paper"]["ranks"] == 2
    assert half["ours"]["worst_times"] == 2 and half["ours"]["median"] == pytest.approx(0.015)
    assert single["paper"]["within"] == 1 and single["paper"]["worst_times"] == pytest.approx(190)
    refuted, held = gar._error_claim("bfloat16", half), gar._error_claim("float32", single)
    assert not refuted["holds"] and "×∞" in refuted["here"] and "paper's GAR 0" in refuted["why"]
    assert held["holds"] and not held["why"]
    assert isinstance(gar.draw({"panels": [panel(1.0)], "errors": found, "model": "x"}), Figure)


def panel(factor: float) -> dict[str, Any]:
    forms, shares = gar_cost.FORMS, gar_cost.SHARES
    counted = {form: [gar_cost.counted_cost(form, 100, share, 0.1) for share in shares] for form in forms}
    counted["first"] = [gar_cost.rank_at(share, 100) / 100 for share in shares]
    counted["blocks"] = [gar_cost.counted_cost("paper", 100, share, 0.0) for share in shares]
    counted["second"] = [whole - first for whole, first in zip(counted["paper"], counted["first"], strict=True)]
    measured = {
        form: [{"mean": factor * one, "sd": 0.01, "n": 3} for one in values] for form, values in counted.items()
    }
    return {"device": "cpu", "dtype": "float32", "shares": gar_cost.SHARES, "measured": measured, "counted": counted}


def test_cost_claims_follow_the_numbers() -> None:
    assert [one["holds"] for one in gar_cost.cost_claims(panel(1.0))] == [True, True, True]
    assert [one["holds"] for one in gar_cost.cost_claims(panel(1.1))] == [True, False, True]
    assert [one["holds"] for one in gar_cost.cost_claims(panel(1.2))] == [False, False, False]
    assert [one["holds"] for one in gar_cost.cost_claims(panel(0.8))] == [False, True, False]
    assert "1.94 ± 0.01 at 0.97" in gar_cost.cost_claims(panel(1.0))[0]["here"]
    why = gar_cost.cost_claims(panel(1.1))[1]["why"]
    assert "at 0.97 the paper's two products alone take 1.067 ± 0.010 (counted 0.970)" in why


def test_the_products_timed_are_those_of_the_layer() -> None:
    layer = gar_cost.random_layer("paper", 32, 12, 0.0, "cpu", torch.float32)
    assert isinstance(layer, GaugeAlignedLinear)
    x = torch.randn(5, 32)
    with torch.no_grad():
        found = [product() for product in gar_cost._products(layer, x).values()]
        torch.testing.assert_close(torch.cat(found, -1), layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.skipif(not gar_cost.can_compile("cpu"), reason="torch.compile has no compiler here")
def test_compiled_layers_are_timed() -> None:
    layers = nn.Linear(8, 8), nn.Linear(8, 8)  # the types of our own are checked here, which does not compile
    with torch.no_grad():
        assert gar_cost._compiled_ratio(*layers, torch.randn(3, 8)) > 0


def test_another_task_and_another_decomposition_are_named(tmp_path: Path, sources: Path) -> None:
    config = parse_config(settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding"))
    with pytest.raises(FlexrankError, match="task is 'embedding'; this study runs on causal language models"):
        gar.run(Request(tmp_path, config=config))
    values = settings(sources / "language", sources / "text.txt", tmp_path) | {"decomposition": {"method": "svd"}}
    with pytest.raises(FlexrankError, match="decomposition.method is 'svd'; this study is of 'datasvd' alone"):
        gar.run(Request(tmp_path, config=parse_config(values)))


@pytest.mark.gpu
def test_a_gpu_is_waited_for() -> None:
    """The timed call returns when the work is done, not when it is queued."""
    layer, x = nn.Linear(4096, 4096, device="cuda"), torch.randn(8192, 4096, device="cuda")
    forward: Callable[[], object] = gar_cost.layer_forward(layer, x)
    forward()
    assert torch.cuda.current_stream().query()
