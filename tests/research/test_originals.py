"""Comparisons with originals: clones that are missing or stale, names that are put back, and what a difference says.

The authors' code is not here: a stand-in with its names, written for this test, takes its place.
"""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flexrank.errors import FlexrankError
from flexrank.nn.linalg import Factors
from research.originals import ORIGINALS, __main__, asvd, original
from research.originals.original import Original

COLLECT = """
import torch

def calib_input_distribution(model, batches, method, use_cache):
    assert method == "abs_mean" and not use_cache
    layers = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    for layer in layers:
        layer.scaling_diag_matrix = 0
        layer.register_forward_hook(record)
    with torch.no_grad():
        for batch in batches:
            model(**batch)

def record(layer, inputs, _):
    layer.scaling_diag_matrix = layer.scaling_diag_matrix + inputs[0][0].abs().mean(0)
"""
LINEAR = """
import torch
from types import SimpleNamespace

class SVDLinear:
    @staticmethod
    def from_linear(layer, ratio, act_aware, alpha):
        rank = int(layer.weight.numel() * ratio) // sum(layer.weight.shape)
        scale = layer.scaling_diag_matrix ** (POWER * alpha)
        left, values, right = torch.svd_lowrank(layer.weight.detach() * scale, rank)
        outer, inner = SimpleNamespace(weight=left * values), SimpleNamespace(weight=right.T / scale)
        return SimpleNamespace(ALinear=outer, BLinear=inner, truncation_rank=rank)
"""


def stand_in(directory: Path, power: float) -> Path:
    (directory / "modules").mkdir(parents=True)
    (directory / "act_aware_utils.py").write_text(COLLECT)
    (directory / "modules" / "svd_linear.py").write_text(LINEAR.replace("POWER", str(power)))
    return directory


def test_asvd_holds_beside_its_like_and_not_beside_another_scale(tmp_path: Path) -> None:
    scales, exact, random = asvd.compare(stand_in(tmp_path / "right", 1.0))
    assert scales["holds"] and exact["holds"] and random["holds"] is None
    scales, exact, random = asvd.compare(stand_in(tmp_path / "wrong", 2.0))
    assert scales["holds"] and exact["holds"] is False and exact["difference"] > 0.01
    assert "act_aware_utils" not in sys.modules and "modules.svd_linear" not in sys.modules


def test_modules_of_a_clone_are_known_inside_the_block_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "some_original.py").write_text("import some_missing\nprint('loud')\n")
    before = list(sys.path)
    with original.importing(tmp_path, {"some_missing": ModuleType("some_missing")}):
        import some_original  # type: ignore[import-not-found]

        assert some_original.some_missing
    assert "some_original" not in sys.modules and "some_missing" not in sys.modules and sys.path == before
    assert capsys.readouterr().out == ""


def git(directory: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", "-C", directory, *names, *arguments], check=True, capture_output=True, text=True
    ).stdout


def test_a_clone_is_there_and_at_its_commit(tmp_path: Path) -> None:
    url = "https://example.org/them/code"
    with pytest.raises(FlexrankError, match=rf"code: no clone; run git clone {url} .*code && git -C .* checkout abc"):
        Original(url, "abc", lambda _: [], None).clone_in(tmp_path)
    clone = tmp_path / "code"
    clone.mkdir()
    git(clone, "init", "-q")
    (clone / "code.py").write_text("one = 1\n")
    git(clone, "add", "code.py")
    git(clone, "commit", "-q", "-m", "one")
    head = git(clone, "rev-parse", "HEAD").strip()
    assert Original(url, head, lambda _: [], None).clone_in(tmp_path) == clone
    with pytest.raises(FlexrankError, match=f"at commit {head}; run git -C .*code checkout abc"):
        Original(url, "abc", lambda _: [], None).clone_in(tmp_path)
    (clone / "code.py").write_text("one = 2\n")
    with pytest.raises(FlexrankError, match="code: code differs from the commit"):
        Original(url, head, lambda _: [], None).clone_in(tmp_path)


def test_differences_and_products_by_hand() -> None:
    factors = Factors(torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.tensor([[3.0, 4.0], [5.0, 5.0]]), torch.ones(2))
    assert torch.equal(original.product(factors, 1), torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
    assert original.difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(0.2)
    assert original.row("it", [0.1, 0.3], 0.2) == {"what": "it", "difference": 0.3, "bound": 0.2, "holds": False}
    assert original.row("it", [0.1, 0.2], 0.2)["holds"] and original.row("it", [0.1])["holds"] is None


@pytest.mark.parametrize("largest", [1e-6, 1e-3])
def test_the_page_has_every_row(largest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [original.row("layers", [largest], 1e-4), original.row("others", [0.5])]
    one = Original("https://example.org/them/code", "abc", lambda _: rows, "What it runs.\n")
    monkeypatch.setattr(Original, "clone_in", lambda self, clones: clones)
    monkeypatch.setattr(__main__, "ORIGINALS", {"code": one})
    page = tmp_path / "page.md"
    result = CliRunner().invoke(__main__.app, ["compare", str(tmp_path), "--page", str(page)])
    text = page.read_text()
    assert "## code\n\nhttps://example.org/them/code at `abc`.\n\nWhat it runs.\n" in text
    assert "| others | 5.0e-01 | – | – |" in text
    assert ("| layers | 1.0e-06 | 1e-04 | yes |" in text) == (largest < 1e-4) == (result.exit_code == 0)
    assert ("| layers | 1.0e-03 | 1e-04 | no |" in text) == (largest > 1e-4)


def test_every_original_says_what_it_runs() -> None:
    assert all(len(one.commit) == 40 and one.about and one.url.startswith("https://") for one in ORIGINALS.values())
