"""What engineers do in Python beyond the examples: it works as in torch, or is refused in one line."""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import flexrank as fr
import tiny
from flexrank.artefacts.inspect import inspect_artefact
from flexrank.calibrate.moments import LayerMoment
from flexrank.data.batches import call_model, eval_mode, one_row, output_tensor
from flexrank.distill.objectives import FeatureObjective, LogitObjective
from flexrank.distill.trainer import DistillationTrainer
from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_profile, nested_layers


class Network(nn.Module):
    """A convolution whose attributes it reads, and a layer that it calls by keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conv = self.conv
        read = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation)
        assert read == (3, 8, (3, 3), (2, 2), (1, 1), (1, 1)) and (conv.groups, conv.padding_mode) == (1, "zeros")
        return self.head(input=conv(input=x).mean((-1, -2)))


def network() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The network, its elastic form, and a batch."""
    base, x = Network(), torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = copy.deepcopy(base)
    fr.decompose_(model, fr.collect_moments(base, [x], select_layers(base)))
    return base, model, x


def perceptron() -> tuple[nn.Module, nn.Module, list[torch.Tensor]]:
    batches = [torch.randn(8, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    base = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 6)).eval()
    model = copy.deepcopy(base)
    fr.decompose_(model, fr.collect_moments(base, batches, select_layers(base)))
    return base, model, batches


def test_layers_are_called_by_keyword_and_read_as_in_torch() -> None:
    base, model, x = network()
    assert tiny.relative(model(x), base(x)) < 1e-5
    small = fr.deploy(model, {"conv": 3, "head": 3})
    with fr.use_profile(model, {"conv": 3, "head": 3}), torch.no_grad():
        assert tiny.relative(small(x), model(x)) < 1e-5
    assert nested_layers(model)["conv"](input=x).shape == small.conv(input=x).shape == (4, 8, 4, 4)


@pytest.mark.parametrize("repeats", [False, True])
def test_texts_packed_into_one_row_do_not_see_each_other(repeats: bool) -> None:
    """Oracle: each text in a row of its own. With a cache, transformers forgets where texts begin."""
    model, ids = tiny.build("llama_tied"), torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(0))
    packed = {"input_ids": ids[None], "position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None]}
    alone = [model(input_ids=part[None]).logits[0] for part in ids.split([5, 7])]
    assert model.config.use_cache
    assert tiny.relative(call_model(model, packed).logits[0], torch.cat(alone)) < 1e-5
    elastic, losses = tiny.elastic("llama_tied"), list[float]()
    options: dict[str, Any] = {"steps": 2, "learning_rate": 1e-9, "gradient_checkpointing": repeats, "method": "paper"}
    fr.distill_(
        elastic, model, [packed], [full_profile(elastic)], on_step=lambda step: losses.append(step.loss), **options
    )
    assert max(losses) < 1e-6


def test_recurrent_layers_are_trained_without_cudnn() -> None:
    """Its recurrent layers have no gradients in eval mode; there is no GPU here to see that."""
    assert torch.backends.cudnn.enabled
    with eval_mode(nn.Sequential(nn.LSTM(3, 3))):
        assert not torch.backends.cudnn.enabled
    with eval_mode(nn.Linear(3, 3)):
        assert torch.backends.cudnn.enabled


def test_a_model_may_be_decomposed_and_loaded_under_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        base, model, batches = perceptron()
    base = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 6)).eval()
    chain = tiny.chain_of(model)
    fr.save_elastic(model, chain, tmp_path, factory="test_python_use:bare")
    with torch.inference_mode():
        found, _ = fr.load_elastic(tmp_path, model=bare())
    batches = [batch.clone() for batch in batches]
    for one in (model, found):
        assert not any(factor.is_inference() for layer in nested_layers(one).values() for factor in (layer.u, layer.v))
    fr.distill_(found, base, batches, [chain.at(0.5)], steps=1)


def bare() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 6))


def needing(width: int) -> nn.Module:
    return nn.Linear(width, width)


def test_bytes_are_those_of_what_is_saved(tmp_path: Path) -> None:
    """The chain was counted in float32."""
    model = tiny.elastic("llama_tied").to(torch.bfloat16)
    chain = tiny.chain_of(tiny.elastic("llama_tied"))
    fr.save_elastic(model, chain, tmp_path / "elastic")
    for row in inspect_artefact(tmp_path / "elastic")["budgets"]:
        small = fr.deploy(*_loaded(tmp_path / "elastic", row["budget"]), slack=0)
        bytes_of = {value.data_ptr(): value.numel() * value.element_size() for value in small.state_dict().values()}
        assert sum(bytes_of.values()) <= row["bytes"] < 1.2 * sum(bytes_of.values())


def test_sizes_are_listed_in_the_dtype_in_which_they_are_cut(tmp_path: Path) -> None:
    model = tiny.elastic("llama_tied")
    chain = tiny.chain_of(model)
    fr.save_elastic(model, chain, tmp_path / "whole")
    fr.save_elastic(model, chain, tmp_path / "half", deployed_dtype=torch.bfloat16)
    whole, half = (inspect_artefact(tmp_path / place)["budgets"] for place in ("whole", "half"))
    assert [row["bytes"] for row in whole] == [2 * row["bytes"] for row in half]
    assert f"| {half[0]['bytes']:,} |" in (tmp_path / "half" / "README.md").read_text()


def _loaded(place: Path, budget: float) -> tuple[nn.Module, Any]:
    model, chain = fr.load_elastic(place, budget=budget)
    return model, chain.at(budget)


def test_embeddings_of_bags_are_frozen_too() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.EmbeddingBag(9, 12), nn.Linear(12, 10)).eval()
    model, batch = copy.deepcopy(base), torch.randint(9, (4, 5))
    fr.decompose_(model, select_layers(model), method="svd")
    fr.distill_(model, base, [batch], [{"1": 2}], steps=2, learning_rate=1e-2)
    assert torch.equal(model[0].weight, base[0].weight)
    assert isinstance(model[1], NestedLayer)


def test_the_trainer_leaves_its_teacher_trainable(tmp_path: Path) -> None:
    import transformers

    teacher, model = tiny.build("llama_tied"), tiny.elastic("llama_tied")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    DistillationTrainer(model, teacher, tiny.chain_of(model), args)
    assert all(parameter.requires_grad for parameter in teacher.parameters())


def test_outputs_may_be_in_a_dictionary() -> None:
    assert output_tensor({"loss": None, "logits": (logits := torch.ones(2))}) is logits
    with pytest.raises(FlexrankError, match="the model returned dict"):
        output_tensor({"else": logits})


def test_a_chain_takes_profiles_that_are_plain_mappings() -> None:
    _, model, _ = perceptron()
    chain = tiny.chain_of(model)
    edited = dataclasses.replace(
        chain, entries=tuple(dataclasses.replace(one, profile=dict(one.profile)) for one in chain.entries)
    )
    assert edited == chain and fr.find_slack(model, edited) == fr.find_slack(
        model, [e.profile for e in chain.requested]
    )


class Detached(FeatureObjective):
    def loss(self, output: Any, target: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().loss(output, target, batch).detach()


def moments_of(model: nn.Module, width: int) -> dict[str, LayerMoment]:
    return {name: LayerMoment("input", torch.eye(width, dtype=torch.float64)) for name in select_layers(model)}


def wrong_moments(base: nn.Module, model: nn.Module, batches: list[Any], place: Path) -> None:
    try:
        fr.decompose_(base, moments_of(base, 12))
    finally:
        assert not any(isinstance(module, NestedLayer) for module in base.modules())


def adapted(base: nn.Module, model: nn.Module, batches: list[Any], place: Path) -> None:
    import peft

    chain = tiny.chain_of(model)
    outer = nn.Sequential(OrderedDict(body=model, top=nn.Linear(6, 6)))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["top"]), outer)
    entries = [dataclasses.replace(e, profile={f"body.{k}": v for k, v in e.profile.items()}) for e in chain.entries]
    fr.save_elastic(outer, dataclasses.replace(chain, entries=tuple(entries)), place, factory="test_python_use:bare")


Misuse = Callable[[nn.Module, nn.Module, list[Any], Path], Any]
HALF = {"0": 4, "2": 3}
MISUSES: dict[str, tuple[Misuse, str]] = {
    "weights by budget": (
        lambda base, model, batches, _: fr.distill_(model, base, batches, [HALF], weights={0.5: 1.0}),
        "weights is a mapping; give a list with a number for each profile",
    ),
    "a loss without a gradient": (
        lambda base, model, batches, _: fr.distill_(model, base, batches, [HALF], steps=1, objective=Detached()),
        "the objective's loss has no gradient",
    ),
    "a teacher of another width": (
        lambda base, model, batches, _: fr.distill_(model, base[:1], batches, [HALF], steps=1),
        r"the model's output has shape \(8, 6\) for the teacher's \(8, 10\)",
    ),
    "logits of other classes": (
        lambda base, model, batches, _: fr.distill_(
            model, base[:1], batches, [HALF], steps=1, objective=LogitObjective()
        ),
        r"the model's output has shape \(8, 6\) for the teacher's \(8, 10\)",
    ),
    "samples without a batch": (
        lambda base, model, batches, _: fr.distillation_evaluator(base, list(batches[0]), LogitObjective()),
        r"logits have shape \(6,\); they are \(B, T, V\) or \(B, classes\)",
    ),
    "names of layers in place of layers": (
        lambda base, model, batches, _: fr.collect_rows(model, batches, ["0"]),
        "layers is a list; it is what select_layers or nested_layers returns",
    ),
    "activations of another model": (
        lambda base, model, batches, _: fr.deploy(model, HALF, activations={"5": torch.ones(3, 12)}),
        "activations of '5' fit no elastic layer",
    ),
    "activations of another width": (
        lambda base, model, batches, _: fr.find_slack(model, [HALF], activations={"0": torch.ones(3, 11)}),
        "activations of '0' fit no elastic layer",
    ),
    "activations of one row": (
        lambda base, model, batches, _: fr.find_slack(model, [HALF], activations={"0": torch.ones(12)}),
        "activations of '0' fit no elastic layer",
    ),
    "a chain of JSON": (
        lambda base, model, batches, _: fr.set_budget(model, 0.5, chain=tiny.chain_of(model).to_json()),
        "chain is a dict; it is a ProfileChain",
    ),
    "an artefact without a chain": (
        lambda base, model, batches, place: fr.save_elastic(model, None, place),
        "chain is a NoneType; it is",
    ),
    "an elastic base": (
        lambda base, model, batches, _: fr.refit_(model, HALF, copy.deepcopy(model), batches),
        "the base model has elastic layers",
    ),
    "moments of another width": (wrong_moments, "layer '2': is 6 x 10, and its moments are of another shape"),
    "moments that are layers": (
        lambda base, model, batches, _: fr.decompose_(base, select_layers(base)),
        "layer '0': method 'datasvd' needs moments",
    ),
    "a factory with arguments": (
        lambda base, model, batches, place: fr.save_elastic(model, tiny.chain_of(model), place, factory=needing),
        "factory test_python_use:needing is called without arguments",
    ),
    "adapters": (adapted, "layer 'top' has an adapter; first merge it"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    call, message = MISUSES[name]
    base, model, batches = perceptron()
    with pytest.raises(FlexrankError, match=message) as caught:
        call(base, model, batches, tmp_path / "artefact")
    assert "\n" not in str(caught.value)


def test_layers_with_backward_hooks_stay_dense() -> None:
    base, *_ = perceptron()
    base[0].register_full_backward_hook(lambda *_: None)
    assert list(select_layers(base)) == ["2"]


class Listed(nn.Module):
    """Runs its layers from a list of its own, and ties the bias of one of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.held = {"list": [self.first], "mapping": {"a": self.first}, "attribute": None, "bias": None}[kind]
        if kind == "attribute":
            vars(self)["other"] = self.first
        if kind == "bias":
            self.shown = nn.ParameterList([self.first.bias])


@pytest.mark.parametrize("kind", ["list", "mapping", "attribute", "bias"])
def test_layers_that_could_not_be_replaced_everywhere_stay_dense(kind: str) -> None:
    assert list(select_layers(Listed(kind))) == ["second"]


@dataclasses.dataclass
class Detected:
    logits: torch.Tensor
    encoder_last_hidden_state: torch.Tensor


class Detector(nn.Module):
    def forward(self, pixel_values: torch.Tensor) -> Detected:
        return Detected(pixel_values, pixel_values)


class Translator(nn.Module):
    def forward(self, input_ids: torch.Tensor, decoder_input_ids: Any = None, **_: Any) -> Detected:
        return Detected(input_ids.float(), input_ids.float())


def test_a_decoder_of_queries_needs_no_inputs_in_the_batch() -> None:
    x = torch.ones(1, 3)
    assert call_model(Detector(), {"pixel_values": x}).logits is x
    call_model(Translator(), {"input_ids": x, "decoder_inputs_embeds": x})
    with pytest.raises(FlexrankError, match="Translator has a decoder, and the batch has nothing for it"):
        call_model(Translator(), {"input_ids": x})


def test_a_batch_of_patches_is_not_cut_to_one_row() -> None:
    images = {"input_ids": torch.ones(2, 5), "pixel_values": torch.ones(32, 4)}
    assert one_row(images) is images
    assert one_row({"input_ids": torch.ones(2, 5), "flag": True})["input_ids"].shape == (1, 5)
    assert one_row(torch.ones(3, 2)).shape == (1, 2) and len(one_row((torch.ones(3, 2), torch.ones(3)))[1]) == 1


def test_a_checkpoint_belongs_to_a_number_of_batches(tmp_path: Path) -> None:
    base, model, batches = perceptron()
    fr.distill_(model, base, batches, [HALF], steps=2, checkpoint=tmp_path / "c")
    with pytest.raises(FlexrankError, match="was written with batches=3, not 2"):
        fr.distill_(model, base, batches[:2], [HALF], steps=2, checkpoint=tmp_path / "c")


def test_the_relative_error_is_of_equal_shapes() -> None:
    """(B, 1) and (B,) would otherwise be compared as (B, B)."""
    x = torch.randn(5, 3)
    objective = FeatureObjective()
    target = objective.target(x.sum(1), x)
    with pytest.raises(FlexrankError, match=r"shape \(5, 1\) for the teacher's \(5,\)"):
        objective.loss(x.sum(1, keepdim=True), target, x)
    assert float(objective.loss(x.sum(1), target, x)) == pytest.approx(0)
    assert functional.mse_loss(x, x) == 0
