"""What a run takes on several equal devices: memory, hours and money of each stage.

    seconds of a stage = operations / sustained rate + bytes / rate of the disk + bytes / rate of the link

All three terms are those of one process, which has its part of the work (docs/scale.md). The rate is for the stage's
dtype: float32 for calibration, as for its moments, float64 for decomposition, the elastic weights' dtype for the probe,
and `training_dtype` for consolidation.

Evaluation and deployment, reading and tokenising texts, and the start of a run are left out. Operations other than
matrix products (norms, softmaxes, the loss, the optimiser) are only in the sustained share, and so are small matrices,
which run slower. Processes are assumed to be equally fast, and their exchanges to reach the link's rate and not to
overlap with computing.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from flexrank.decompose import decomposition_owners
from flexrank.errors import FlexrankError
from flexrank.nn.blocks import block_stack
from flexrank.run.config import RunConfig
from flexrank.run.dry_run import operations
from flexrank.run.dry_run.architecture import Architecture
from flexrank.run.dry_run.devices import Device
from flexrank.run.dry_run.memory import step_bytes, tensor_bytes, trained_part
from flexrank.run.dry_run.moments import moment_bytes
from flexrank.run.tables import ordered_layers, split_block


class Work(NamedTuple):
    """What one process does in a stage: operations in a dtype, and bytes through its disk and its link."""

    operations: float
    dtype: str
    disk_bytes: float
    link_bytes: float

    def seconds(self, device: Device) -> float:
        """The stage's seconds on this device."""
        link = self.link_bytes / device.link if device.link else 0.0
        return self.operations / device.rate(self.dtype) + self.disk_bytes / device.disk + link


def busiest_process_config(config: RunConfig, count: int) -> RunConfig:
    """The config of the process with most to do, out of `count`: its calibration batches, and its rows of a step."""
    data, distillation = config.data, config.distillation
    batches = math.ceil(math.ceil(data.calibration / data.batch_size) / count)
    own = {"calibration": min(data.calibration, batches * data.batch_size)}
    rows = {"batch_size": math.ceil(distillation.batch_size / count)}
    parts = {"data": data.model_copy(update=own), "distillation": distillation.model_copy(update=rows)}
    return config.model_copy(update=parts)


def plan_run(
    architecture: Architecture,
    config: RunConfig,
    memory: Mapping[str, Mapping[str, int]],
    tokens: int,
    device: Device,
    count: int,
) -> dict[str, Any]:
    """What the run takes, as a JSON object: a device's bytes and missing bytes, hours and money, by stage and in all.

    Args:
        architecture: the run's architecture.
        config: the run's configuration, as for one process.
        memory: bytes of one process, by stage and part; see `count_memory`.
        tokens: tokens of consolidation, in all processes.
        device: one of the devices, which are equal.
        count: the number of devices.

    Raises:
        FlexrankError: there are several devices, and `device` has no link rate.
    """
    if count > 1 and device.link is None:
        raise FlexrankError(f"device {device.name!r} has no speed of a link between devices; set its link, or --gpus 1")
    works = stage_works(architecture, config, device, count)
    hours = {stage: work.seconds(device) / 3600 for stage, work in works.items()}
    tokens_per_second = tokens / hours["consolidation"] / 3600 if tokens else None

    def row(stage: str, size: int) -> dict[str, Any]:
        missing, own = max(0, size - device.memory), hours.get(stage)
        work = works[stage]._asdict() if stage in works else None
        return {
            "bytes": size, "bytes_missing": missing, "work": work, "hours": own, "money": _money(own, device, count),
        }  # fmt: skip

    return {
        "device": device.model_dump(),
        "devices": count,
        "batch_rows": config.distillation.batch_size,
        "stages": {stage: row(stage, parts["all"]) for stage, parts in memory.items()},
        "fits": all(parts["all"] <= device.memory for parts in memory.values()),
        "tokens_per_second": tokens_per_second,
        "hours": sum(hours.values()),
        "money": _money(sum(hours.values()), device, count),
    }


def plan_notes(plan: Mapping[str, Any]) -> list[str]:
    """What the figures of `plan_run` mean, one line each."""
    notes = [
        "plan: a model, not a measurement: operations over the sustained rate of products, and bytes over the rates of "
        "disk and link. Processes share the work, and memory in consolidation if it is sharded; evaluation and "
        "deployment have no hours.",
    ]
    rows, count = plan["batch_rows"], plan["devices"]
    if rows % count:
        most = math.ceil(rows / count)
        notes.append(
            f"distillation.batch_size is {rows}, which {count} processes do not share evenly: a step takes the time of "
            f"{most} row{'s' * (most > 1)} a process. Take a multiple of {count}, and less distillation.accumulation."
        )
    return notes


def stage_works(architecture: Architecture, config: RunConfig, device: Device, count: int) -> dict[str, Work]:
    """What a process does in each stage whose operations are counted; arguments as for `plan_run`."""
    own, settings = busiest_process_config(config, count), config.distillation
    step = step_bytes(architecture, trained_part(architecture, own), own, count)
    base = tensor_bytes(architecture.teacher, architecture.file_dtype)
    elastic = tensor_bytes(architecture.student)
    moments = reduced_bytes(sum(moment_bytes(architecture, config).values()), count)
    saved = math.ceil(settings.steps / settings.checkpoint_every) * (step["gradients"] + step["optimizer"])
    exchanged = settings.steps * exchanged_bytes(architecture, config, count)
    probe, dtype = operations.probe(architecture, config) / count, training_dtype(config, device)
    return {
        "calibration": Work(operations.calibration(architecture, own), "float32", base, moments),
        "decomposition": Work(
            longest_decomposition(architecture, config, count), "float64", elastic, (1 - 1 / count) * elastic
        ),
        "probe": Work(probe, config.dtype, base + elastic if probe else 0, 0),
        "consolidation": Work(operations.consolidation(architecture, own), dtype, base + elastic + saved, exchanged),
    }


def training_dtype(config: RunConfig, device: Device) -> str:
    """The dtype that consolidation computes in on this device."""
    autocast = config.distillation.autocast
    chosen = device.auto if autocast == "auto" else autocast
    return "bfloat16" if chosen == "bfloat16" else config.dtype


def reduced_bytes(size: float, count: int) -> float:
    """Bytes that a process sends, and receives, to sum `size` bytes over N processes in a ring: 2·(N - 1)/N of them."""
    return 2 * (count - 1) / count * size


def exchanged_bytes(architecture: Architecture, config: RunConfig, count: int) -> float:
    """Bytes that a process sends, and receives, in a step of consolidation to sum gradients.

    With sharded models, each batch of a step gathers the active factors twice, in the forward pass and when a block
    runs again, and the teacher's blocks once; the factors' gradients go back in float32.
    """
    numbers = active_numbers(architecture, config)
    if not config.distillation.sharded:
        return reduced_bytes(4 * numbers, count)
    blocks = [one for _, one in block_stack(architecture.teacher, architecture.shapes)]
    teacher = sum(tensor_bytes(block, architecture.file_dtype) for block in blocks)
    factors = (2 * architecture.teacher.dtype.itemsize + 4) * numbers
    return config.distillation.accumulation * reduced_bytes(factors + teacher, count) / 2


def active_numbers(architecture: Architecture, config: RunConfig) -> float:
    """How many gradients a step sums over processes, a mean over budgets: active components, and all else trained.

    Vectors of sizes are left out.
    """
    student = architecture.student
    factors = sum(min(shape) * sum(shape) for shape in architecture.shapes.values())
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    active = 0.0
    for ranks, share in operations.drawn_profiles(architecture, config):
        active += share * sum(rank * sum(architecture.shapes[name]) for name, rank in ranks.items())
    return trained - factors + active


def longest_decomposition(architecture: Architecture, config: RunConfig, count: int) -> int:
    """Operations of the process with most to decompose in each block, summed over blocks, as these run in sequence."""
    costs, total = operations.layer_decompositions(architecture, config), 0
    for _, names in itertools.groupby(ordered_layers(costs), lambda name: split_block(name)[0]):
        shapes = {name: architecture.shapes[name] for name in names}
        loads = [0] * count
        for name, owner in decomposition_owners(shapes, count).items():
            loads[owner] += costs[name]
        total += max(loads)
    return total


def _money(hours: float | None, device: Device, count: int) -> float | None:
    return None if hours is None or device.price is None else hours * device.price * count
