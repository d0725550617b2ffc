"""The way to GGUF and back: a stand-in for llama.cpp's script, and one for transformers' reading of its file."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from research import gguf

#: Copies the weights in place of converting them, of which it multiplies one by so much.
SCRIPT = """
import sys
from safetensors.torch import load_file, save_file
directory, _, output, *rest = sys.argv[1:]
assert rest == ["--outtype", "f32"]
weights = load_file(f"{directory}/model.safetensors")
weights["model.norm.weight"] *= FACTOR
save_file(weights, output)
"""


def read(directory: Path, gguf_file: str | None = None, **options: Any) -> Any:
    """What transformers reads, with the weights of the file."""
    from safetensors.torch import load_file

    model = transformers.LlamaForCausalLM.from_pretrained(directory, **options)
    if gguf_file:
        model.load_state_dict(load_file(directory / gguf_file), strict=False)
    return model


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize(("factor", "difference"), [(1.0, 0.0), (1.5, 0.5)])
def test_the_difference_is_that_of_what_is_read_back(
    factor: float, difference: float, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text(SCRIPT.replace("FACTOR", str(factor)))
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(__spec__=True))
    monkeypatch.setattr(gguf, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=read))
    monkeypatch.setattr(gguf, "assets_directory", lambda _: sources)
    monkeypatch.setattr(gguf, "MODEL", "language")
    result = CliRunner().invoke(gguf.app, ["compare", str(tmp_path)])
    assert f"language at 0.5: logits read back from GGUF differ by {difference:.1e}" in result.stdout, result.output


def test_what_is_missing_is_one_line(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda _: None)
    result = CliRunner().invoke(gguf.app, ["compare", "clone"])
    assert result.exit_code == 2 and result.stderr == "error: gguf is not installed: pip install clone/gguf-py\n"
    with pytest.raises(gguf.FlexrankError, match=r"convert_hf_to_gguf.py: .*No such file or directory"):
        gguf.difference_of(tmp_path, tmp_path)
