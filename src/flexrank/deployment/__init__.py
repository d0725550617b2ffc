"""From an elastic model at a profile to a plain small one, and to an artefact that was seen to load elsewhere."""

import copy
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flexrank.artefacts.deployed import DOCUMENT, Factory, describe_deployed, write_batch, write_state
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, output_tensor, to_device
from flexrank.deployment.environment import modules_environment
from flexrank.deployment.planning import Activations, LayerPlan, factors, plan_layer
from flexrank.errors import FlexrankError
from flexrank.files import directory_aside, read_json, write_json
from flexrank.hf import models
from flexrank.nn.layers import (
    GaugeAlignedConv2d,
    GaugeAlignedLayer,
    GaugeAlignedLinear,
    NestedLayer,
    Slack,
)
from flexrank.nn.matrix import matrix_shape
from flexrank.nn.specs import build_layer, layer_spec
from flexrank.nn.surgery import nested_layers, require_fitting
from flexrank.profiles.costs import aligned_parameters, dense_parameters

#: Largest relative difference ‖y − y*‖/‖y*‖ between the outputs of an exported model here and in a fresh process.
#: The same weights run the same code, so only the order of sums may differ: a few roundings of the dtype.
OUTPUT_BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def deploy(
    model: nn.Module,
    profile: Mapping[str, int] | Mapping[str, LayerPlan],
    *,
    dtype: torch.dtype | None = None,
    slack: Slack = "auto",
    activations: Activations | None = None,
    base: nn.Module | None = None,
) -> nn.Module:
    """A plain deep copy of the elastic model at `profile`: gauge-aligned layers, dense ones where these are no larger.

    The elastic model is untouched. Biases, device, mode, `requires_grad` and ties are kept. A transformers model then
    saves itself with `save_pretrained`, and loads with `from_pretrained` wherever flexrank is imported.

    Args:
        model: with elastic layers.
        profile: a rank for each of them, or the plans of `fit_plans`.
        dtype: of the copy; the model's by default. Non-persistent buffers (rotary frequencies) keep theirs.
        slack: columns left unaligned in every layer, at most its rank; "auto" measures it, 0 is the paper's form
            (FlexRank, eq. 7).
        activations: input rows of each layer, from `collect_rows`, that "auto" measures the dtype's error on;
            standard normal rows by default.
        base: the model before decomposition; where every rank is full, the result is a copy of it, bit for bit.

    Raises:
        FlexrankError: the profile does not fit the model, or the slack is negative or too small for a layer.
    """
    layers = nested_layers(model)
    ranks = {name: value.rank if isinstance(value, LayerPlan) else value for name, value in profile.items()}
    require_fitting(layers, ranks)
    if base is not None and all(ranks[name] == min(layer.matrix_shape) for name, layer in layers.items()):
        small = copy.deepcopy(base).train(model.training)
        return small if dtype is None else _cast(small, dtype)
    rows = activations or {}
    deployed = {
        name: _deploy_layer(name, layer, profile[name], rows.get(name), dtype, slack) for name, layer in layers.items()
    }
    # The memo makes deepcopy put the deployed layers in, wherever a module stands; elastic weights are never copied.
    small = copy.deepcopy(model, {id(layer): deployed[name] for name, layer in layers.items()})
    if dtype is not None:
        _cast(small, dtype)
    if models.is_transformers_model(small):
        models.attach(small, {name: layer_spec(layer) for name, layer in deployed.items()})
    return small


def deployed_parameters_of(small: nn.Module, layers: Iterable[str]) -> int:
    """Parameters of the matrices of the named layers as they are deployed, without biases.

    Args:
        small: what `deploy` returned.
        layers: the factorised layers' names, such as a profile.
    """
    total = 0
    for name in layers:
        layer = small.get_submodule(name)
        if isinstance(layer, GaugeAlignedLayer):
            total += aligned_parameters(layer.matrix_shape, layer.rank, layer.slack)
        else:
            total += dense_parameters(matrix_shape(layer))
    return total


def export(
    small: nn.Module,
    directory: str | Path,
    inputs: Batch,
    *,
    tokenizer: Any = None,
    factory: Factory | None = None,
    timeout: float = 1800.0,
) -> None:
    """Writes a deployed model and publishes it only after a fresh process has loaded it and given equal outputs.

    Args:
        small: what `deploy` returned.
        directory: an artefact there is replaced, only on success; a directory that holds anything else is refused.
        inputs: a batch to run, as `batches.call_model` takes it.
        tokenizer: written beside a transformers model.
        factory: for any other model: how a fresh process builds its bare architecture.
        timeout: seconds that the fresh process may take.

    Raises:
        FlexrankError: keys are missing or unexpected, or outputs differ by more than `OUTPUT_BOUNDS`. Nothing is left.
    """
    library = "transformers" if models.is_transformers_model(small) else "torch"
    if library == "torch" and factory is None:
        raise FlexrankError(f"export of a {type(small).__name__} needs factory=, 'package.module:function'")
    expected = _outputs(small, inputs)
    request = {"library": library, "device": str(model_device(small)), "threads": torch.get_num_threads()}
    with directory_aside(directory, DOCUMENT) as aside, tempfile.TemporaryDirectory() as scratch:
        if library == "transformers":
            models.save_model(small, aside, tokenizer)
            specs = models.attached_layers(small)
            describe_deployed(small, aside, library=library, layers=specs, aliases={}, factory=None)
        else:
            write_state(small, aside, factory=factory)
        write_batch(Path(scratch) / "inputs.safetensors", inputs)
        write_json(Path(scratch) / "request.json", request)
        _run_verification(aside, Path(scratch), timeout)
        _compare(Path(scratch), expected, str(directory))


def output_bound(dtype: torch.dtype) -> float:
    """The stated bound for outputs of this dtype (`OUTPUT_BOUNDS`; 0 for integers)."""
    return OUTPUT_BOUNDS.get(dtype, 0.0)


@torch.no_grad()
def _deploy_layer(
    name: str, layer: NestedLayer, plan: LayerPlan | int, rows: Tensor | None, dtype: torch.dtype | None, slack: Slack
) -> nn.Module:
    try:
        if not isinstance(plan, LayerPlan):
            plan = plan_layer(layer, plan, dtype=dtype, slack=slack, rows=rows)
        new = _build_deployed(layer, plan, dtype or layer.u.dtype)
    except FlexrankError as error:
        raise FlexrankError(f"layer {name!r}: {error}") from error
    for parameter_name, parameter in new.named_parameters():
        source = layer.bias if parameter_name.endswith("bias") and layer.bias is not None else layer.u
        parameter.requires_grad_(source.requires_grad)
    return new.train(layer.training)


def _build_deployed(layer: NestedLayer, plan: LayerPlan, dtype: torch.dtype) -> nn.Module:
    u, v = factors(layer, plan.rank)
    bias = None if layer.bias is None else layer.bias.detach()
    if plan.slack is not None:
        if layer.geometry is None:
            return GaugeAlignedLinear.from_factors(u, v, bias, slack=plan.slack, dtype=dtype)
        return GaugeAlignedConv2d.from_factors(u, v, bias, layer.geometry, slack=plan.slack, dtype=dtype)
    dense = build_layer(layer_spec(layer) | {"form": "dense"}, device=u.device, dtype=dtype)
    assert isinstance(dense, (nn.Linear, nn.Conv2d))
    dense.weight.copy_((u @ v.T).reshape(dense.weight.shape))
    if bias is not None and dense.bias is not None:
        dense.bias.copy_(bias)
    return dense


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters and persistent buffers to `dtype`, in place. The others are recomputed by whoever loads the model."""
    persistent = {id(value) for value in model.state_dict(keep_vars=True).values()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) in persistent and buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return model


@torch.no_grad()
def _outputs(small: nn.Module, inputs: Batch) -> Tensor:
    """The model's outputs in eval mode; every module's mode is then as it was.

    Raises:
        FlexrankError: they are not finite.
    """
    with eval_mode(small):
        outputs = output_tensor(call_model(small, to_device(inputs, model_device(small)))).cpu()
    if not bool(torch.isfinite(outputs).all()):
        raise FlexrankError("the model's outputs for these inputs are not finite; nothing was exported")
    return outputs


def _run_verification(artefact: Path, scratch: Path, timeout: float) -> None:
    """Runs `flexrank.deployment.verification` in a new interpreter that sees the same modules and no network."""
    environment = modules_environment() | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "flexrank.deployment.verification", str(artefact), str(scratch)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise FlexrankError(
            f"the exported model did not load and run within {timeout:g} s; nothing was kept"
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise FlexrankError(f"the exported model failed in a fresh process, nothing was kept: {lines[-1]}")


def _compare(scratch: Path, expected: Tensor, directory: str) -> None:
    """Raises unless the loader reported nothing and the outputs are within the bound."""
    report = read_json(scratch / "report.json")
    for problem, names in report.items():
        raise FlexrankError(f"{directory}: {problem} on reloading ({', '.join(names[:3])} …); nothing was kept")
    found = load_file(scratch / "outputs.safetensors")["output"]
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise FlexrankError(
            f"{directory}: the reloaded model returns {found.dtype} {tuple(found.shape)}, not "
            f"{expected.dtype} {tuple(expected.shape)}; nothing was kept"
        )
    scale = float(expected.double().norm())
    error = float((found.double() - expected.double()).norm()) / (scale or 1.0)
    if not error <= output_bound(expected.dtype):
        raise FlexrankError(
            f"{directory}: outputs differ by {error:.1e} on reloading, above the bound "
            f"{output_bound(expected.dtype):.1e} of {expected.dtype}; nothing was kept"
        )
