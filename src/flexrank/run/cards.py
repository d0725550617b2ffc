"""The model card (README.md) of each artefact of a run, with the metadata that the hub reads."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexrank.files import write_aside
from flexrank.run.report import Summary, note, table_cells
from flexrank.run.tables import count

CARD = "README.md"
#: The hub's name of each task, and the class of transformers that loads its models.
PIPELINES = {"language": "text-generation", "embedding": "feature-extraction", "classification": "image-classification"}
CLASSES = {
    "language": "AutoModelForCausalLM", "embedding": "AutoModel", "classification": "AutoModelForImageClassification",
}  # fmt: skip
#: How factors are made, by `decomposition.method`.
DECOMPOSITIONS = {
    "fisher": "DataSVD with outputs weighted by the loss's gradients", "datasvd": "DataSVD",
    "paper": "DataSVD as the paper prints it", "svd": "plain SVD",
}  # fmt: skip

_ELASTIC = """# {name}, elastic

Every size from one set of weights: those of {model}, decomposed by flexrank (FlexRank, ICML 2026) into components in
order of importance. A size is the first components of each layer; only those are read.

```python
import flexrank
from transformers import {kind}

size = flexrank.FlexRankConfig(budget={budget:g})  # or max_params=…, max_bytes=…
model = {kind}.from_pretrained("{place}", quantization_config=size)
```
"""
_DEPLOYED = """# {name} at {share:.3g}

{model} with {parameters} parameters, {layers} of them in its factorised layers: {share:.0%} of what those had. Cut by
flexrank (FlexRank, ICML 2026) from one set of weights that holds every size{origin}.

```python
import flexrank  # teaches transformers the layers; trust_remote_code=True does it too
from transformers import {kind}

model = {kind}.from_pretrained("{place}")
```
"""


def write_cards(directory: Path, summary: Summary) -> list[Path]:
    """Writes the cards of a finished run's elastic model and deployed sizes; returns where they are."""
    cards = {directory / "elastic": elastic_card(summary)}
    for export in summary["deployed"]:
        cards[directory / export["directory"]] = deployed_card(summary, export)
    for place, text in cards.items():
        _write(place, text)
    return [place / CARD for place in cards]


def write_card(place: Path, summary: Summary, export: Mapping[str, Any], tuned: int = 0) -> None:
    """Writes the card of one size of a finished run, exported to `place`; `tuned` are its own steps of training."""
    _write(place, deployed_card(summary, export, tuned))


def _write(place: Path, text: str) -> None:
    with write_aside(place / CARD) as aside:
        aside.write_text(text, encoding="utf8")


def elastic_card(summary: Summary) -> str:
    """The card of the artefact that holds every size."""
    middle = summary["rows"][len(summary["rows"]) // 2]["budget"]
    return _metadata(summary) + _ELASTIC.format(**_names(summary), budget=middle, place="elastic") + _made(summary)


def deployed_card(summary: Summary, export: Mapping[str, Any], tuned: int = 0) -> str:
    """The card of one size: an entry of the summary's `deployed`, or what `export_one` returns."""
    budget, origin = export.get("budget"), ""
    if tuned:
        origin = f", then trained by itself for {tuned} steps"
    elif budget in [row["budget"] for row in summary["rows"]]:
        origin = f"; it is the row {budget:g} of the table"
    facts = {"share": budget or export["relative_size"], "origin": origin, "place": Path(export["directory"]).name}
    facts |= {"parameters": count(export["params_model"]), "layers": count(export["params_layers"])}
    return _metadata(summary) + _DEPLOYED.format(**_names(summary), **facts) + _made(summary)


def _names(summary: Summary) -> dict[str, str]:
    return {"name": summary["name"], "model": f"`{summary['model']}`", "kind": CLASSES[summary["task"]]}


def _metadata(summary: Summary) -> str:
    """The card's head; a model that is no name of the hub is not one's base there."""
    from huggingface_hub import ModelCardData

    model = str(summary["model"])
    is_named = re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None and not Path(model).exists()
    data = ModelCardData(
        library_name="transformers", pipeline_tag=PIPELINES[summary["task"]], tags=["flexrank", "low-rank"],
        base_model=model if is_named else None,
    )  # fmt: skip
    return f"---\n{data.to_yaml()}\n---\n"


def _made(summary: Summary) -> str:
    """The table of sizes, and how they were made."""
    header, rows = table_cells(summary)
    table = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    steps, method = summary["distillation"]["steps"], summary["allocation"]["method"]
    factors = DECOMPOSITIONS[summary["decomposition"]["method"]]
    trained = f"{steps} steps of distillation from the base model" if steps else "no training"
    how = f"Made by {factors}, {method} allocation of ranks for all budgets, and {trained}."
    licence = "The licence is that of the base model."
    return "\n".join(["\n## Sizes\n", *table, "", note(summary), "", how, licence, ""])
