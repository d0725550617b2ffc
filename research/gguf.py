"""`python -m research.gguf LLAMA_CPP`: converts a size to GGUF with llama.cpp, and reads it back with transformers.

LLAMA_CPP is a clone of https://github.com/ggml-org/llama.cpp. The size is stories260k at budget 0.5, factorised by
plain SVD, in its dense form. transformers needs the package `gguf` to read the file; the clone has it in `gguf-py`.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

from flexrank import export, export_to
from flexrank.cli.exits import OneLineErrors
from flexrank.deployment.exports import relative_difference
from flexrank.deployment.runtimes import TRACED, sample_inputs
from flexrank.errors import FlexrankError
from flexrank.hf.models import load_model
from research.assets import assets_directory
from research.benches.runtimes import deployed_sizes
from research.machine import last_line

MODEL, BUDGET = "stories260k", 0.5
app = typer.Typer(cls=OneLineErrors, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def _group() -> None:
    """A size as GGUF."""


@app.command()
def compare(clone: Annotated[Path, typer.Argument(help="A clone of llama.cpp.")]) -> None:
    """Prints how far the logits of the converted model, read back, are from those of the dense form."""
    if importlib.util.find_spec("gguf") is None:
        raise FlexrankError(f"gguf is not installed: pip install {clone / 'gguf-py'}")
    with tempfile.TemporaryDirectory() as scratch:
        difference = difference_of(clone, dense_form(assets_directory(MODEL) / MODEL, Path(scratch)))
    typer.echo(f"{MODEL} at {BUDGET:g}: logits read back from GGUF differ by {difference:.1e} from the dense form's")


def dense_form(source: Path, scratch: Path) -> Path:
    """Writes the model's size as a plain transformers model with its tokenizer, and returns the directory."""
    ((_, small),) = deployed_sizes(load_model(source, "language"), [BUDGET], [])
    export(small, scratch / "small", sample_inputs(small, *TRACED))
    export_to(scratch / "small", "dense", scratch / "dense")
    return scratch / "dense"


def difference_of(clone: Path, dense: Path) -> float:
    """Returns the relative difference of the logits on one batch; raises FlexrankError if the clone's script fails."""
    script, file = clone / "convert_hf_to_gguf.py", "small.gguf"
    command = [sys.executable, str(script), str(dense), "--outfile", str(dense / file), "--outtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FlexrankError(f"{script}: {last_line(done.stderr)}")
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(dense, gguf_file=file, dtype=torch.float32)
    batch = sample_inputs(plain, *TRACED)
    with torch.no_grad():
        return relative_difference(again(**batch).logits, plain(**batch).logits)


if __name__ == "__main__":
    app(["compare", *sys.argv[1:]], prog_name="python -m research.gguf")
