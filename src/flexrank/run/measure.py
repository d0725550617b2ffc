"""A run's deployed models against the base model: latency of a prompt and of decoding, tokens per second, peak memory.

Everything is measured in a fresh process: one that has just trained makes small models look slower than they are.
"""

import functools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from flexrank.artefacts.tensors import read_batch, write_batch
from flexrank.data.batches import call_model, eval_mode, model_device, output_tensor
from flexrank.deployment.machine import (
    interleave,
    latency_ratio,
    machine_facts,
    median_ratio,
    reset_peak,
    resident_peak,
    synchronised,
)
from flexrank.deployment.process import in_fresh_process
from flexrank.files import dtype_name, write_json
from flexrank.hf import models
from flexrank.nn.switch import stored_sizes
from flexrank.progress import track
from flexrank.run.fitting import most_tokens
from flexrank.run.sizes import Sizes
from flexrank.run.tables import PLAIN
from flexrank.run.workspace import Workspace

#: The least number of alternating rounds, and their least total seconds; tokens generated after a prompt of PROMPT.
REPEATS, LEAST_SECONDS, NEW_TOKENS, PROMPT = 9, 2.0, 24, 32
#: The least seconds for which a size and the base model are timed, for the table of a run.
RATIO_SECONDS = 1.0
RESULT = "measurement.json"


class Workload(NamedTuple):
    """What is timed: its name, its tokens (or images), the call, and what is counted."""

    name: str
    tokens: int
    call: Callable[[nn.Module], object]
    unit: str = "tokens"


def measure_run(directory: Path) -> dict[str, Any]:
    """Measures the base model and every budget of a trained run in a fresh process; writes RUN/measurement.json."""
    result: dict[str, Any] = in_fresh_process(measure_sizes, str(directory))
    write_json(directory / RESULT, result)
    return result


def latency_ratios(directory: str) -> list[float]:
    """Each budget's time over the base model's on the run's example batch, in the order of `allocation.budgets`."""
    sizes = Sizes.of_run(directory)
    work, settings = sizes.work, sizes.work.config.evaluation
    ratios = []
    for budget in track(work.config.allocation.budgets, "measuring latency"):
        small = sizes.deployed(sizes.chain.at(budget))
        ratios.append(
            latency_ratio(small, work.deployed_base, work.samples.example, settings.latency_repeats, RATIO_SECONDS)
        )
    return ratios


def measure_sizes(directory: str) -> dict[str, Any]:
    """The complete measurement: a row for the base model and one per budget."""
    sizes = Sizes.of_run(directory)
    work, base = sizes.work, sizes.work.deployed_base
    workloads = _workloads(work, base)
    rows = [{"name": "base", **_measure(work, base, base, workloads)}]
    for budget in track(work.config.allocation.budgets, "measuring sizes"):
        small = sizes.deployed(sizes.chain.at(budget))
        rows.append({"name": f"{budget:g}", **_measure(work, small, base, workloads)})
        del small  # before the next one is made
    return {
        "model": work.config.model,
        "dtype": dtype_name(work.deployed_dtype),
        "machine": machine_facts(),
        "workloads": [{"name": one.name, "tokens": one.tokens, "unit": one.unit} for one in workloads],
        "rows": rows,
    }


def print_measurement(result: Mapping[str, Any], console: Console) -> None:
    """Prints times over the base model's, then weights, memory, latency and tokens per second."""
    names = [workload["name"] for workload in result["workloads"]]
    ratios = Table("budget", *names, title="time over the base model's, in turn", **PLAIN)
    for row in result["rows"]:
        ratios.add_row(row["name"], *(f"{time['ratio']:.2f}" for time in row["times"]))
    columns = [f"{one['name']}: {unit}" for one in result["workloads"] for unit in ("ms", f"{one['unit']}/s")]
    sizes = Table("budget", "MB of weights", "MB at the peak", *columns, **PLAIN)
    for row in result["rows"]:
        cells = [f"{row['bytes'] / 1e6:.1f}", f"{row['peak'] / 1e6:.1f}" if row["peak"] else "-"]
        for workload, time in zip(result["workloads"], row["times"], strict=True):
            cells += [f"{1e3 * time['seconds']:.1f}", f"{workload['tokens'] / time['seconds']:.0f}"]
        sizes.add_row(row["name"], *cells)
    for table in (ratios, sizes):
        console.print(table)


def peak_of_forward(directory: str, task: Any, dtype: str, batch: str) -> int:
    """Peak memory in bytes of loading a saved model and of one forward pass, beyond the libraries."""
    import transformers  # noqa: F401  # in memory before the count begins

    before = reset_peak()
    model = models.load_model(directory, task, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        output_tensor(call_model(model, read_batch(Path(batch), torch.device("cpu"))))
    return resident_peak() - before


def _workloads(work: Workspace, base: Any) -> list[Workload]:
    """A forward pass of one sample and of a batch; for language models that can generate, decoding too."""
    example: Any = work.samples.example
    device, first = model_device(base), next(iter(example.values()))
    batches = [{key: value[:count].to(device) for key, value in example.items()} for count in sorted({1, len(first)})]
    workloads = [_forward_workload(batch) for batch in batches]
    generates = work.config.task == "language" and callable(getattr(base, "generate", None))
    limit = most_tokens(base) if generates else 0
    if limit is None or limit >= NEW_TOKENS:  # the last token that is generated is not read
        length = PROMPT if limit is None else max(1, min(PROMPT, limit - NEW_TOKENS))
        prompt = {key: value[:1, :length] for key, value in batches[0].items()}
        generate = functools.partial(_generate, prompt)
        workloads.append(Workload(f"{NEW_TOKENS} tokens generated", NEW_TOKENS, generate))
    return workloads


def _forward_workload(batch: Mapping[str, torch.Tensor]) -> Workload:
    shape = next(iter(batch.values())).shape
    plural = "" if shape[0] == 1 else "s"
    call = functools.partial(call_model, batch=batch)
    if "pixel_values" in batch:
        return Workload(f"{shape[0]} image{plural}", shape[0], call, "images")
    return Workload(f"{shape[0]} text{plural} of {shape[1]} tokens", int(batch["attention_mask"].sum()), call)


def _generate(prompt: Mapping[str, Any], model: Any) -> None:
    model.generate(**prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)


def _measure(work: Workspace, small: Any, base: nn.Module, workloads: Sequence[Workload]) -> dict[str, Any]:
    times = []
    with eval_mode(small, base), torch.inference_mode():
        for workload in workloads:
            runs = [synchronised(functools.partial(workload.call, one), model_device(one)) for one in (small, base)]
            own, others = interleave(runs, REPEATS, least_seconds=LEAST_SECONDS)
            ratio = 1.0 if small is base else median_ratio(own, others)
            times.append({"seconds": statistics.median(own), "ratio": ratio})
    return {"times": times, "bytes": stored_sizes(small)[1], "peak": _peak(work, small)}


def _peak(work: Workspace, small: Any) -> int | None:
    """Peak memory of loading and running in a fresh process; None if the system does not report it."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    with tempfile.TemporaryDirectory() as scratch:
        model, batch = Path(scratch, "model"), Path(scratch, "batch.safetensors")
        models.save_model(small, model)
        write_batch(batch, work.samples.example)
        task, dtype = work.config.task, dtype_name(work.deployed_dtype)
        peak: int = in_fresh_process(peak_of_forward, str(model), task, dtype, str(batch))
        return peak
