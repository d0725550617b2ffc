"""torchao on a deployed model, by the code of docs/deployment.md: both factors in 8 or 4 bits, and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexrank.artefacts.elastic import save_elastic
from flexrank.deployment import export
from tiny import batch_for, chain_of, deployed, elastic, outputs, relative

pytest.importorskip("torchao")
# torchao's own, as it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

DOCUMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


def blocks_of_the_page() -> list[str]:
    section = DOCUMENT.read_text(encoding="utf8").partition("## Quantisation")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def require_rounded(found: torch.nn.Module, part: torch.nn.Linear, levels: float, group: int) -> None:
    """Each weight is within half a step, of which a group's largest weight is so many."""
    values = found(torch.eye(part.in_features)).T.unflatten(1, (-1, group))
    wanted = part.weight.unflatten(1, (-1, group))
    steps = wanted.abs().amax(-1, keepdim=True) / levels
    assert ((values - wanted).abs() <= 0.51 * steps + 1e-7).all() and not values.equal(wanted)


def test_the_code_of_the_page_rounds_both_factors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flexrank.deployment import exports
    from tiny_runs import here

    monkeypatch.setattr(exports, "in_fresh_process", here)
    batch, model = batch_for("llama_untied"), elastic("llama_untied")
    export(deployed("llama_untied"), tmp_path / "small", batch)
    save_elastic(model, chain_of(model), tmp_path / "elastic")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    eight, four = blocks_of_the_page()
    exec(eight, names)
    before = transformers.AutoModelForCausalLM.from_pretrained("small")
    low = dict(names["small"].named_modules())
    for name, part in before.named_modules():
        if name.endswith((".latent", ".expand")):
            require_rounded(low[name], part, 127.5, part.in_features)
        elif isinstance(part, torch.nn.Linear):
            assert low[name].weight.equal(part.weight) and type(low[name].weight) is torch.nn.Parameter
    assert 1e-4 < relative(outputs(names["small"], batch), outputs(before, batch)) < 0.2

    exec(four, names)
    before = transformers.AutoModelForCausalLM.from_pretrained("elastic", quantization_config=names["size"])
    low = dict(names["small"].named_modules())
    rounded = [name for name, part in before.named_modules() if names["is_rounded"](part, name)]
    assert len(rounded) > 10 and all(name.endswith(".latent") for name in rounded)  # of 32 inputs; ranks are smaller
    for name, part in before.named_modules():
        if name in rounded:
            require_rounded(low[name], part, 7.5, 32)
        elif isinstance(part, torch.nn.Linear):
            assert low[name].weight.equal(part.weight)
