"""torchao on a deployed model, by the code of docs/deployment.md: both factors in 8 bits, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexrank.deployment import export
from tiny import batch_for, deployed, outputs, relative

pytest.importorskip("torchao")
# torchao's own, as it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

DOCUMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


def code_of_the_page() -> str:
    section = DOCUMENT.read_text(encoding="utf8").partition("## Quantisation")[2]
    return section.partition("```python\n")[2].partition("```")[0]


def test_the_code_of_the_page_rounds_both_factors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flexrank.deployment import exports
    from tiny_runs import here

    monkeypatch.setattr(exports, "in_fresh_process", here)
    batch = batch_for("llama_untied")
    export(deployed("llama_untied"), tmp_path / "small", batch)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code_of_the_page(), names)
    before = transformers.AutoModelForCausalLM.from_pretrained("small")
    low = dict(names["small"].named_modules())
    for name, part in before.named_modules():
        if name.endswith((".latent", ".expand")):
            found = low[name](torch.eye(part.in_features)).T
            steps = part.weight.abs().amax(1, keepdim=True) / 127.5
            assert ((found - part.weight).abs() <= 0.51 * steps + 1e-7).all() and not found.equal(part.weight)
        elif isinstance(part, torch.nn.Linear):
            assert low[name].weight.equal(part.weight) and type(low[name].weight) is torch.nn.Parameter
    assert 1e-4 < relative(outputs(names["small"], batch), outputs(before, batch)) < 0.2
