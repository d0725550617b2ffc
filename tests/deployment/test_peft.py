"""LoRA on a deployed model, by the code of docs/deployment.md: adapters on all layers, and merged."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from flexrank.deployment import export
from tiny import batch_for, outputs, partly_dense, relative

peft = pytest.importorskip("peft")
# peft reads transformers' old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

DOCUMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


def code_of_the_page(number: int = 0) -> str:
    section = DOCUMENT.read_text(encoding="utf8").partition("## Fine-tuning")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number]


@pytest.fixture(scope="module", params=["llama_untied", "gpt2"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's code leaves, its own few steps included, in a directory that has an export `small/`."""
    place = tmp_path_factory.mktemp("peft")
    batch = batch_for(request.param)
    with pytest.MonkeyPatch.context() as patch:
        from flexrank.deployment import exports
        from tiny_runs import here

        patch.setattr(exports, "in_fresh_process", here)
        export(partly_dense(request.param), place / "small", batch)
        patch.chdir(place)
        names: dict[str, Any] = {"batches": [batch | {"labels": batch["input_ids"]}] * 12}
        before = transformers.AutoModelForCausalLM.from_pretrained("small")
        exec(code_of_the_page(), names)
    return names | {"place": place, "batch": batch, "before": before}


def test_both_factors_and_dense_layers_learn(adapted: dict[str, Any]) -> None:
    state = peft.PeftModel.from_pretrained(adapted["before"], adapted["place"] / "adapter").state_dict()
    layers = {name.rpartition(".lora_A")[0] for name in state if ".lora_A" in name}
    small = transformers.AutoModelForCausalLM.from_pretrained(adapted["place"] / "small")
    parts = {name for name, one in small.named_modules() if isinstance(one, (torch.nn.Linear, Conv1D))}
    assert {name.removeprefix("base_model.model.") for name in layers} == parts - {"lm_head"}
    assert {"latent", "expand"} < {name.rpartition(".")[2] for name in parts - {"lm_head"}}  # and layers that are dense
    assert all(value.norm() > 0 for name, value in state.items() if ".lora_B" in name)
    assert adapted["losses"][-1] < 0.9 * adapted["losses"][0]


def test_merged_factors_compute_what_the_adapters_did_and_load_anywhere(adapted: dict[str, Any]) -> None:
    batch, place = adapted["batch"], adapted["place"]
    small = transformers.AutoModelForCausalLM.from_pretrained(place / "small")
    unmerged = outputs(peft.PeftModel.from_pretrained(small, place / "adapter").eval(), batch)
    assert relative(outputs(adapted["merged"], batch), unmerged) < 1e-5
    again = transformers.AutoModelForCausalLM.from_pretrained(place / "tuned")
    assert relative(outputs(again, batch), unmerged) < 1e-5
    plain = transformers.AutoModelForCausalLM.from_pretrained(place / "small")
    assert relative(unmerged, outputs(plain, batch)) > 1e-2  # it has learnt something
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (again, plain)]
    assert shapes[0] == shapes[1]  # ranks and bytes stay


def test_some_layers_are_adapted_by_what_they_consist_of() -> None:
    small = partly_dense("llama_untied")
    names: dict[str, Any] = {"small": small, "torch": torch, "peft": peft}
    exec(code_of_the_page(1), names)
    model = peft.get_peft_model(small, names["config"])
    adapted = {name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert {name.removeprefix("base_model.model.") for name in adapted} == set(names["names"])
    kinds = {".".join(name.split(".")[4:]) for name in names["names"]}
    assert kinds == {"q_proj", "v_proj.latent", "v_proj.expand"}  # this size keeps q_proj dense
    with pytest.raises(ValueError, match="not supported"):
        peft.get_peft_model(partly_dense("llama_untied"), peft.LoraConfig(target_modules=["v_proj"]))
    options = {"target_modules": "all-linear", "exclude_modules": ".*lm_head.*", "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(partly_dense("llama_untied"), peft.LoraConfig(**options))
    assert not any("lm_head" in name for name, _ in model.named_parameters() if "lora" in name)
