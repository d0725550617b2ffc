"""What `flexrank measure --calibrate-plan` measures, in less than a minute: the constants of a dry run's plan.

They are rates of the machine at hand: of matrix products with the shapes in a Llama's block; of two consolidation steps
of a small Llama and of one factorisation, in the operations that the dry run counts for them; and of writing a file.
The link between devices is not measured.
"""

import copy
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from flexrank.data.batches import model_device
from flexrank.deployment.machine import interleave, machine_facts, synchronised
from flexrank.distill import distill_
from flexrank.files import write_json
from flexrank.hf import models
from flexrank.nn.linalg import Factors, data_svd
from flexrank.nn.select import nest_
from flexrank.profiles.costs import Shape
from flexrank.run.config import RunConfig, parse_config
from flexrank.run.dry_run import operations
from flexrank.run.dry_run.architecture import build_architecture
from flexrank.run.dry_run.devices import ByDtype, Device
from flexrank.run.training import autocast_dtype


class Size(NamedTuple):
    """Sizes to measure: a model's width and classes, a batch's rows and tokens a row, a factorised matrix's width."""

    width: int
    classes: int
    rows: int
    tokens: int
    factorised: int


SIZES = {"cpu": Size(512, 4096, 4, 128, 384), "cuda": Size(2048, 32000, 8, 1024, 2048)}
#: The width of the Llama's heads, its number of layers, and the inner width of its blocks over the outer.
HEAD, LAYERS, INNER = 64, 2, 3
#: Timed rounds, after one for warm-up; bytes that are written; and budgets, with one step at each.
REPEATS, DISK_BYTES, BUDGETS = 5, 2**28, (0.8, 0.4)


def measure_device(directory: Path) -> Device:
    """Measures the GPU if there is one, otherwise the CPU, and the disk of this directory."""
    device, facts = torch.device("cuda" if torch.cuda.is_available() else "cpu"), machine_facts()
    size = SIZES[device.type]
    products, share = {}, {}
    for name, rate in (("float64", factorisation_rate), ("float32", step_rate), ("bfloat16", autocast_step_rate)):
        products[name] = product_rate(size, device, getattr(torch, name))
        share[name] = rate(size, device) / products[name]
    return Device(
        name=facts.get("gpu", facts["processor"]),
        memory=memory_bytes(device),
        products=ByDtype(**products),
        share=ByDtype(**share),
        disk=write_rate(directory),
        auto="off" if autocast_dtype("auto", device) is None else "bfloat16",
    )


def memory_bytes(device: torch.device) -> int:
    """Bytes of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def product_rate(size: Size, device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a batch's products with matrices of the three shapes in a block."""
    width, inner = size.width, INNER * size.width
    shapes = [(width, width), (inner, width), (width, inner)]
    weights = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    rows = [torch.randn(size.rows * size.tokens, n, device=device).to(dtype) for _, n in shapes]

    def multiply() -> None:
        for weight, inputs in zip(weights, rows, strict=True):
            inputs @ weight.T

    counted = sum(2 * size.rows * size.tokens * m * n for m, n in shapes)
    return counted / _seconds(multiply, device)


def step_rate(size: Size, device: torch.device, autocast: torch.dtype | None = None) -> float:
    """Counted operations per second of consolidation, with float32 weights and one step at each of `BUDGETS`."""
    with tempfile.TemporaryDirectory() as place:
        config, model = llama_run(size, Path(place))
        architecture = build_architecture(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    teacher = model.to(device)
    student = random_elastic(teacher, architecture.shapes)
    ids = torch.randint(size.classes, (size.rows, size.tokens))
    profiles = [ranks for ranks, _ in operations.drawn_profiles(architecture, config)][::-1]
    train = functools.partial(
        distill_, student, teacher, [{"input_ids": ids}], profiles, weights=[1.0] * len(profiles),
        steps=len(profiles), autocast=autocast, teacher_cache=0,
    )  # fmt: skip
    return operations.consolidation(architecture, config) / _seconds(train, device)


autocast_step_rate = functools.partial(step_rate, autocast=torch.bfloat16)


def llama_run(size: Size, place: Path) -> tuple[RunConfig, Any]:
    """The config of a small Llama's run, whose config.json it writes to `place`, and its uninitialised model."""
    heads, path = size.width // HEAD, place / "config.json"
    architecture = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": size.width, "head_dim": HEAD,
        "intermediate_size": INNER * size.width, "num_hidden_layers": LAYERS, "num_attention_heads": heads,
        "num_key_value_heads": heads, "vocab_size": size.classes, "max_position_embeddings": size.tokens,
    }  # fmt: skip
    write_json(path, architecture)
    settings = {"batch_size": size.rows, "steps": len(BUDGETS), "weights": [1.0] * len(BUDGETS)}
    config = {
        "name": "plan", "task": "language", "model": "plan", "architecture": str(path), "distillation": settings,
        "data": {"max_tokens": size.tokens}, "layers": {"exclude": ["lm_head"]}, "allocation": {"budgets": BUDGETS},
    }  # fmt: skip
    return parse_config(config), models.skeleton(place)


def random_elastic(model: nn.Module, shapes: Mapping[str, Shape]) -> nn.Module:
    """A copy of the model with random factors in the layers of these shapes."""
    student, device = copy.deepcopy(model), model_device(model)
    for name, shape in shapes.items():
        u, v = (torch.randn(min(shape), size, device=device) / shape[1] ** 0.5 for size in shape)
        nest_(student, name, Factors(u, v, torch.ones(min(shape), device=device)))
    return student


def factorisation_rate(size: Size, device: torch.device) -> float:
    """Counted operations per second of decomposing a square matrix in float64."""
    width = size.factorised
    weight, rows = torch.randn(width, width, device=device), torch.randn(2 * width, width, device=device)
    moment = rows.double().T @ rows.double()
    factorise = functools.partial(data_svd, weight, input_moment=moment)
    return operations.factorisation((width, width), "datasvd") / _seconds(factorise, device)


def write_rate(directory: Path) -> float:
    """Bytes per second of writing a file in this directory and flushing it to the disk."""
    block = os.urandom(2**20)

    def write() -> None:
        with tempfile.TemporaryFile(dir=directory) as file:
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    return DISK_BYTES / _seconds(write, torch.device("cpu"))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The least time over all rounds, waiting for the device each time: other work on a machine only adds to it."""
    (seconds,) = interleave([synchronised(run, device)], REPEATS, warmup=1)
    return min(seconds)
