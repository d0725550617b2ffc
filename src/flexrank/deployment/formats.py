"""Exports a deployed transformers model to another runtime: written, loaded and run there, and only then published."""

import contextlib
import importlib.util
import logging
import shutil
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flexrank import files
from flexrank.artefacts.cards import LICENCE, card_metadata, read_about, read_card_metadata
from flexrank.artefacts.deployed import DOCUMENT, KIND
from flexrank.artefacts.inspect import PROGRAM_DOCUMENT, PROGRAM_KIND, inspect_artefact
from flexrank.data.batches import output_tensor
from flexrank.deployment.dense import dense_model
from flexrank.deployment.exports import OUTPUT_BOUNDS, relative_difference, require_no_problems
from flexrank.deployment.runtimes import RUNTIMES, TRACED, Inputs, Run, program_of, sample_inputs
from flexrank.errors import FlexrankError, first_line, is_out_of_memory
from flexrank.hf import models
from flexrank.hf.companions import CARD, PICKLES
from flexrank.hf.remote_code import REMOTE_MODULE
from flexrank.nn.experts import SEPARATE_KEY
from flexrank.nn.quantised import is_quantised

FORMATS = ("dense", *RUNTIMES)
#: Rows and tokens of the batches that an export is verified on: the one that was traced, and one of another shape.
VERIFIED = (TRACED, (1, 13))
#: Largest relative difference ‖y − y*‖/‖y*‖ of an export's outputs from the deployed model's, by the dtype of both.
#: torch runs the same kernels. The others sum in another order, and dense multiplies out each factor's rounding errors:
#: the difference is up to 2e-6 in float32 on models of two layers, 9e-6 on one of six, and 1e-2 in bfloat16
#: (`python -m research runtimes`). Rounding errors grow with depth, so the bounds leave a factor of ten; the error of a
#: wrong conversion is far above them.
BOUNDS: dict[str, dict[torch.dtype, float]] = {
    "dense": {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-4},
    "torch": OUTPUT_BOUNDS,
    "onnx": {torch.float32: 1e-4},
    "openvino": {torch.float32: 1e-4},
    "executorch": {torch.float32: 1e-4},
}
#: For an export's card: the hub's name of the library that loads it, and how; `batch` holds tensors, `arrays` numpy's.
LOADING = {
    "dense": ("transformers", 'from transformers import {kind}\n\nmodel = {kind}.from_pretrained(".")'),
    "torch": ("pytorch", 'import torch\n\noutput = torch.export.load("model.pt2").module()(**batch)'),
    "onnx": ("onnx", 'import onnxruntime\n\n(output,) = onnxruntime.InferenceSession("model.onnx").run(None, arrays)'),
    "openvino": ("openvino", 'import openvino\n\noutput = openvino.Core().compile_model("model.xml")(arrays)[0]'),
    "executorch": (
        "executorch",
        'from executorch.runtime import Runtime\n\nprogram = Runtime.get().load_program("model.pte")\n'
        'output = program.load_method("forward").execute(list(batch.values()))[0]',
    ),
}
#: The logger by which torch.onnx says at every export that torchvision is missing.
REGISTRATION = "torch.onnx._internal.exporter._registration"
log = logging.getLogger("flexrank")


def export_to(directory: str | Path, format: str, output: str | Path) -> dict[str, Any]:
    """Writes a deployed transformers model for another runtime, verified there against the model itself.

    Args:
        directory: what `export` or `flexrank deploy` wrote.
        format: dense (plain transformers, each layer multiplied out), torch (a `torch.export` program), onnx, openvino
            or executorch.
        output: an earlier export in this directory is replaced, only on success; one with only other files is refused.

    Returns:
        What `export.json` holds beside its checksums: to, class, dtype, inputs, bytes, versions, bound and error, the
        largest relative difference that was measured.

    Raises:
        FlexrankError: there is no such format, its library is missing, the directory holds no deployed transformers
            model, the format cannot express it, or outputs differ by more than `BOUNDS`. Nothing is published.
    """
    require_format(format)
    _require_deployed(directory)
    with files.directory_aside(output, PROGRAM_DOCUMENT) as aside:
        model = _loaded(directory, format)
        batches = [sample_inputs(model, *shape, seed=seed) for seed, shape in enumerate(VERIFIED)]
        with _clear_failures(format, type(model).__name__):
            error = _write_and_measure(model, format, Path(directory), aside, batches)
        bound = BOUNDS[format].get(model.dtype, 0.0)
        if not error <= bound:
            problem = f"outputs differ by {error:.1e}, above the bound {bound:.1e} of {format} in {model.dtype}"
            raise FlexrankError(f"{output}: {problem}; nothing was kept")
        facts = _facts(model, format, batches[0], bound, error) | {"bytes": files.directory_bytes(aside)}
        files.write_document(aside / PROGRAM_DOCUMENT, PROGRAM_KIND, facts | {"files": files.digest_files(aside)})
        _write_card(aside, facts, Path(directory) / CARD)
    return facts


def require_format(format: str) -> None:
    """Raises FlexrankError if there is no such format, or its library is missing; the error names the extra for it."""
    if format not in FORMATS:
        raise FlexrankError(f"format {format!r} is unknown; it is one of {', '.join(FORMATS)}")
    for package in RUNTIMES[format].packages if format in RUNTIMES else ():
        if importlib.util.find_spec(package) is None:
            raise FlexrankError(f"{package} is not installed: pip install 'flexrank[{format}]'")


def _require_deployed(directory: str | Path) -> None:
    artefact = inspect_artefact(directory)
    if artefact["kind"] == PROGRAM_KIND:
        raise FlexrankError(f"{directory}: an export to {artefact['to']}; export the deployed size it was made from")
    if artefact["kind"] != KIND:
        mend = "write one of its sizes with `flexrank deploy`, or `fr.export`"
        raise FlexrankError(f"{directory}: an elastic artefact with all sizes; {mend}, and export that")
    if artefact["library"] != "transformers":
        raise FlexrankError(f"{directory}: holds a {artefact['class']} of torch; it must be a transformers model")


def _loaded(directory: str | Path, format: str) -> Any:
    """Loads the deployed model, in float32 for a runtime that keeps no other dtype."""
    models.verify_export(directory)
    model, _ = models.load_by_architecture(directory)
    if is_quantised(model.state_dict()):
        raise FlexrankError(f"{directory}: holds quantised weights; export the size as it was before")
    if format not in RUNTIMES or RUNTIMES[format].keeps_dtype or model.dtype == torch.float32:
        return model
    log.info("%s: the weights are %s, and are written in float32", format, files.dtype_name(model.dtype))
    return model.float()


def _write_and_measure(model: Any, format: str, source: Path, aside: Path, batches: list[Inputs]) -> float:
    """Writes the export; returns the largest relative difference of its outputs from the model's, NaN if one is NaN."""
    with torch.no_grad():
        wanted = [output_tensor(model(**batch)) for batch in batches]
    if format == "dense":
        log.info("dense: as large and as slow as the base model; plain transformers and its converters read it")
        models.save_model(dense_model(model, source), aside)
    else:
        RUNTIMES[format].write(program_of(model), batches[0], aside)
    _add_companions(source, aside)
    run = read_export(aside, format)
    errors = [relative_difference(run(batch), one) for batch, one in zip(batches, wanted, strict=True)]
    return max(errors, key=lambda error: (error != error, error))


def read_export(directory: Path, format: str) -> Run:
    """Loads an export in its runtime; raises FlexrankError if a tensor is missing or unexpected."""
    if format in RUNTIMES:
        return RUNTIMES[format].read(directory)
    model, report = models.load_by_architecture(directory)
    require_no_problems(report, directory)
    return torch.no_grad()(lambda inputs: output_tensor(model(**inputs)))


@contextlib.contextmanager
def _clear_failures(format: str, architecture: str) -> Iterator[None]:
    """Turns an exporter's errors into a FlexrankError that names the model's class, and hides its warnings."""
    registration = logging.getLogger(REGISTRATION)
    before = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # exporters warn of their own deprecated parts
            yield
    except (FlexrankError, OSError, ModuleNotFoundError):
        raise
    except Exception as error:  # each library raises its own kinds
        if is_out_of_memory(error):
            raise
        raise FlexrankError(f"{format} cannot express {architecture}: {first_line(error)}; nothing was kept") from error
    finally:
        registration.setLevel(before)


def _add_companions(source: Path, aside: Path) -> None:
    """Copies tokenizer, processor and generation settings, and the config without what only flexrank reads.

    Pickles and checkpoints, which training left there, and other artefacts are not copied.
    """
    own = {"config.json", CARD, DOCUMENT, f"{REMOTE_MODULE}.py"}
    for path in source.iterdir():
        is_weights = ".safetensors" in path.name or path.suffix in PICKLES or path.name.startswith("checkpoint-")
        if path.name in own or is_weights or path.name.startswith(".") or _holds_artefacts(path, aside):
            continue
        if path.is_dir():
            shutil.copytree(path, aside / path.name)
        else:
            shutil.copy(path, aside)
    config = files.read_json(source / "config.json")
    ours = ("quantization_config", "auto_map", SEPARATE_KEY)
    files.write_json(aside / "config.json", {key: value for key, value in config.items() if key not in ours})


def _holds_artefacts(path: Path, aside: Path) -> bool:
    """Whether this is a directory in which an artefact is, or is being written."""
    places = [path, *filter(Path.is_dir, path.rglob("*"))] if path.is_dir() else []
    return any(files.documents_of(place) for place in places) or aside.resolve() in [one.resolve() for one in places]


def _write_card(aside: Path, facts: dict[str, Any], source: Path) -> None:
    """Writes an export's card: how to load it, how close its outputs are, and parts of the deployed model's card."""
    library, code = LOADING[facts["to"]]
    kind = facts["class"]
    near = f"outputs are within {facts['error']:.1e} of that model's, relative, in {facts['dtype']}"
    near += ", and it is as large as the base model" if facts["to"] == "dense" else ""
    title, about = read_about(source)
    lines = [
        f"# {title or kind} for {facts['to']}", "", *[about, ""] * bool(about),
        f"`flexrank export --to {facts['to']}` wrote it of a model that flexrank (FlexRank, ICML 2026) deployed: "
        f"{near}.", "", f"```python\n{code.format(kind=kind)}\n```", "",
    ]  # fmt: skip
    card = source.read_text(encoding="utf8", errors="replace") if source.is_file() else ""
    _, sizes, after = card.partition("## Sizes")
    rest = f"{sizes}{after}" or f"{LICENCE}\n"
    text = card_metadata(kind, "", read_card_metadata(source), library) + "\n".join(lines) + f"\n{rest}"
    (aside / CARD).write_text(text, encoding="utf8")


def _facts(model: Any, format: str, inputs: Inputs, bound: float, error: float) -> dict[str, Any]:
    libraries = ("torch", "transformers", "flexrank", *(RUNTIMES[format].packages if format in RUNTIMES else ()))
    owners = metadata.packages_distributions()  # onnxruntime-gpu provides onnxruntime, for one
    return {
        "to": format,
        "class": type(model).__name__,
        "dtype": files.dtype_name(model.dtype),
        "inputs": list(inputs),
        "bound": bound,
        "error": error,
        "versions": {name: metadata.version(owners[name][0]) for name in libraries},
    }
