"""SVD-LLM with its low-rank fine-tuning (Wang et al., ICLR 2025, section 3.3), and adapters for other rivals.

The paper adapts U, then V, with rank 8 and instruction labels; here each gets half of the steps, and both distil the
base model. Adapters merge into the factors, so they do not change a size. The paper's ranks are uniform; flexrank's
joint ranks, with which the untrained factors are better, make a second method.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from flexrank.nn.elastic import NestedLinear
from flexrank.nn.matrix import is_conv1d
from flexrank.nn.switch import nested_layers, set_profile
from flexrank.profiles import RankProfile
from research.baselines.method import NotApplicable, filled_ranks
from research.baselines.svd_llm import SVD_LLM
from research.baselines.trained.ranks import at
from research.baselines.trained.task import Settings, Size, TrainedMethod, TrainingTask, rates, trained_parameters

#: The adapters' rank in the paper, and the α by which they are scaled, over the rank.
RANK, ALPHA = 8, 16


def adapt_(model: nn.Module, layers: Sequence[str], seed: int) -> None:
    """Adds adapters to these linear layers in place: W + (α / r) · B A, with B zero and A random (Hu et al., 2022)."""
    import peft

    is_transposed = any(is_conv1d(model.get_submodule(name)) for name in layers)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(layers), lora_dropout=0.0, fan_in_fan_out=is_transposed
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)


def pair(layer: NestedLinear) -> nn.Sequential:
    """Returns the layer at its rank r as two linear layers: `v` (n → r) without bias, then `u` (r → m)."""
    (u, v), bias, rank = layer.active, layer.active_bias, layer.rank
    first = nn.Linear(v.shape[1], rank, bias=False, device=v.device, dtype=v.dtype)
    second = nn.Linear(rank, u.shape[1], bias=bias is not None, device=u.device, dtype=u.dtype)
    first.weight.data, second.weight.data = v.detach().clone(), u.detach().T.contiguous()
    if bias is not None:
        second.bias.data = bias.detach().clone()
    modules = nn.Sequential()
    modules.add_module("v", first)
    modules.add_module("u", second)
    return modules


def published(task: TrainingTask, settings: Settings) -> Iterator[Size]:
    """Makes each size separately, at uniform ranks."""
    return _sizes(task, settings, lambda budget: filled_ranks(task.layers, dict.fromkeys(task.layers, budget), budget))


def joint(task: TrainingTask, settings: Settings) -> Iterator[Size]:
    """Makes each size separately, at joint ranks from the sensitivity of DataSVD, whose factors are the same."""
    return _sizes(task, settings, task.chain("datasvd", "joint").at)


def _sizes(task: TrainingTask, settings: Settings, ranks: Callable[[float], RankProfile]) -> Iterator[Size]:
    """Yields the whitened factors at each budget's ranks, after adapters on U, then on V."""
    whole = task.prepared(_whitened)
    for budget in task.budgets:
        profile = ranks(budget)
        ((_, parameters),) = at(whole, profile)
        if parameters > task.parameter_limit(budget):  # even at the least ranks
            yield None
            continue
        model = copy.deepcopy(whole)
        set_profile(model, profile)
        for name, layer in nested_layers(model).items():
            assert isinstance(layer, NestedLinear)
            model.set_submodule(name, pair(layer))
        steps, rate = task.steps_per_size // 2, task.learning_rate(settings)
        adapt_(model, [f"{name}.{factor}" for name in profile for factor in ("u", "v")], task.seed)
        for phase, factor in enumerate(("u", "v")):
            adapters = trained_parameters(model, [f".{factor}.lora_"])
            task.train_(model, adapters, task.objective, steps, rate, first_batch=phase * steps)
        yield model, parameters


def _whitened(task: TrainingTask) -> nn.Module:
    model = copy.deepcopy(task.teacher)
    layers = {name: model.get_submodule(name) for name in task.layers}
    for name, layer in layers.items():
        if isinstance(layer, nn.Conv2d):
            raise NotApplicable(f"layer {name!r} is a convolution; adapters here are of linear layers")
    SVD_LLM.decompose_(model, task.calibration, layers, lambda output, batch: output)
    return model


_SOURCE, _RATES = "Wang et al., ICLR 2025", rates("learning_rate", 2.5e-4, 5e-4, 1e-3, 2e-3)
SVD_LLM_LORA = TrainedMethod("svd-llm + lora", _SOURCE, False, _RATES, published)
SVD_LLM_LORA_JOINT = TrainedMethod("svd-llm + lora, joint", _SOURCE, False, _RATES, joint, table="datasvd")
