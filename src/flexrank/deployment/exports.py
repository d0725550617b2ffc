"""Exports a deployed model, published only after a fresh process has loaded it and returned equal outputs."""

import contextlib
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flexrank.artefacts.deployed import DOCUMENT, Factory, describe_deployed, load_deployed, write_state
from flexrank.artefacts.tensors import read_batch, write_batch
from flexrank.data.batches import OUTPUTS, Batch, call_model, eval_mode, model_device, output_tensor, to_device
from flexrank.deployment.process import in_fresh_process
from flexrank.errors import FlexrankError
from flexrank.files import clear_write_errors, directory_aside
from flexrank.hf import models
from flexrank.hf.companions import save_companions
from flexrank.nn.linalg import full_precision
from flexrank.nn.select import drop_autocast_, require_in_memory, require_merged, unwrapped

#: Largest relative difference ‖y − y*‖/‖y*‖ between the outputs of an exported model here and in a fresh process.
#: The same weights run the same code, so only the order of sums may differ: a few roundings of the dtype.
OUTPUT_BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
#: How many values of the outputs are compared at once.
COMPARE_CHUNK = 2**16


def export(
    small: nn.Module,
    directory: str | Path,
    inputs: Batch,
    *,
    tokenizer: Any = None,
    factory: Factory | None = None,
    timeout: float = 1800.0,
) -> None:
    """Writes a deployed model and publishes it only after a fresh process has loaded it and returned equal outputs.

    Args:
        small: what `deploy` returned.
        directory: an artefact there is replaced, only on success; a directory with only other files is refused.
        inputs: a batch to run, as `batches.call_model` takes it.
        tokenizer: written beside a transformers model.
        factory: builds the bare architecture of any other model, in the fresh process.
        timeout: seconds that the fresh process may take.

    Raises:
        FlexrankError: keys are missing or unexpected, or outputs differ by over `OUTPUT_BOUNDS`. Nothing is published.
    """
    small = unwrapped(small)
    require_merged(small)
    require_in_memory(small)
    library = models.library_of(small)
    if library == "torch" and factory is None:
        raise FlexrankError(f"export of a {type(small).__name__} needs factory=, 'package.module:function'")
    autocast = drop_autocast_(small)  # a fresh process loads the model without it
    try:
        expected = _outputs(small, inputs)
    finally:
        vars(small).update(autocast)
    with directory_aside(directory, DOCUMENT) as aside, tempfile.TemporaryDirectory() as scratch:
        if library == "transformers":
            models.save_model(small, aside)
            save_companions(small, aside, tokenizer)
            specs = models.attached_layers(small)
            describe_deployed(small, aside, library=library, layers=specs, aliases={}, factory=None)
        else:
            write_state(small, aside, factory=factory)
        write_batch(Path(scratch, "inputs.safetensors"), inputs)
        device = model_device(small)
        attention = models.other_attention(small) if library == "transformers" else {}
        with _moved_to_cpu(small):
            report = _load_and_run(aside, Path(scratch), library, device, attention, timeout)
        _compare(report, Path(scratch, "outputs.safetensors"), expected, str(directory))


def load_and_run(
    artefact: str, scratch: str, library: str, device: str, attention: dict[str, str]
) -> dict[str, list[str]]:
    """Runs SCRATCH/inputs.safetensors, writes SCRATCH/outputs.safetensors; returns the loader's report by problem."""
    problems: dict[str, list[str]] = {}
    model: Any
    if library == "transformers":
        models.verify_export(artefact)
        model, report = models.load_by_architecture(artefact, **attention)
        problems = {key: sorted(map(str, value)) for key, value in report.items()}
    else:
        model = load_deployed(artefact)
    inputs = read_batch(Path(scratch, "inputs.safetensors"), torch.device(device))
    with clear_write_errors(outputs := Path(scratch, "outputs.safetensors")):
        save_file(_outputs(model.to(device), inputs), outputs)
    return problems


def _load_and_run(
    artefact: Path, scratch: Path, library: str, device: torch.device, attention: dict[str, str], timeout: float
) -> dict[str, list[str]]:
    """Calls `load_and_run` in a fresh process that does not use the hub."""
    arguments = (str(artefact), str(scratch), library, str(device), attention)
    offline = {"HF_HUB_OFFLINE": "1"}
    try:
        return in_fresh_process(load_and_run, *arguments, timeout=timeout, environment=offline)
    except FlexrankError as error:
        raise FlexrankError(f"the exported model failed in a fresh process, nothing was kept: {error}") from error


@contextlib.contextmanager
def _moved_to_cpu(model: nn.Module) -> Iterator[None]:
    """Moves the model to the CPU inside the block, so a fresh process has room on its device, and back after."""
    device = model_device(model)
    model.to("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # no other process can use the memory that this one caches
    try:
        yield
    finally:
        model.to(device)


@torch.no_grad()
def _outputs(small: nn.Module, inputs: Batch) -> dict[str, Tensor]:
    """The model's outputs in eval mode by name, as `_compared` chooses them; restores every module's mode.

    Raises FlexrankError if one is not finite.
    """
    device = model_device(small)
    with eval_mode(small), full_precision(device):
        outputs = _compared(call_model(small, to_device(inputs, device)))
    for name, values in outputs.items():
        if not bool(torch.isfinite(values).all()):
            raise FlexrankError(f"the model's {name} is not finite; check weights and inputs; nothing was exported")
    return {name: values.cpu().contiguous() for name, values in outputs.items()}


def _compared(output: Any) -> dict[str, Tensor]:
    """What `output_tensor` finds; of an output without it, such as that of a head for questions, all real tensors."""
    if isinstance(output, Mapping) and not any(output.get(field) is not None for field in OUTPUTS):
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        if real := {name: value for name, value in tensors.items() if value.is_floating_point()}:
            return real
    return {"output": output_tensor(output)}


def _compare(report: Mapping[str, Sequence[str]], file: Path, expected: Mapping[str, Tensor], directory: str) -> None:
    """Raises unless the loader reported nothing and the outputs are within the bound."""
    require_no_problems(report, directory)
    outputs = load_file(file)
    for name, values in expected.items():
        _compare_one(outputs[name], values, directory)


def _compare_one(reloaded: Tensor, expected: Tensor, directory: str) -> None:
    if reloaded.shape != expected.shape or reloaded.dtype != expected.dtype:
        raise FlexrankError(
            f"{directory}: the reloaded model returns {reloaded.dtype} {tuple(reloaded.shape)}, not "
            f"{expected.dtype} {tuple(expected.shape)}; nothing was kept"
        )
    error = relative_difference(reloaded, expected)
    bound = OUTPUT_BOUNDS.get(expected.dtype, 0.0)
    if not error <= bound:
        raise FlexrankError(
            f"{directory}: outputs differ by {error:.1e} on reloading, above the bound {bound:.1e} of "
            f"{expected.dtype}; nothing was kept"
        )


def require_no_problems(report: Mapping[str, Iterable[Any]], directory: str | Path) -> None:
    """Raises FlexrankError if the report on loading a transformers model names tensors, missing or unexpected."""
    for problem, names in report.items():
        if names:
            some = ", ".join(sorted(map(str, names))[:3])
            raise FlexrankError(f"{directory}: {problem} on reloading ({some} …); nothing was kept")


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """‖y − y*‖/‖y*‖ of two tensors, in float64; raises FlexrankError if their shapes differ."""
    if found.shape != expected.shape:
        raise FlexrankError(f"the outputs have shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    lengths = [_length(map(torch.sub, _doubles(found), _doubles(expected))), _length(_doubles(expected))]
    return lengths[0] / (lengths[1] or 1.0)


def _doubles(values: Tensor) -> Iterator[Tensor]:
    """Yields the values in float64 part by part: a copy of all would be up to four times as large as the logits."""
    return (part.double() for part in values.flatten().split(COMPARE_CHUNK))


def _length(parts: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts))
