"""The model card (README.md) of each artefact of a finished run: as `artefacts.cards` writes it, with measurements."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexrank.artefacts import cards
from flexrank.files import write_text
from flexrank.hf.companions import CARD
from flexrank.run.figures import Summary
from flexrank.run.report import note, table_cells
from flexrank.run.tables import count

#: The transformers class that loads most models of a task.
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
"""
_DEPLOYED = """# {name} at {size:.3g}

{model} with {parameters} parameters, {layers} of them in its factorised layers: {share:.0%} of what those had. Cut by
flexrank (FlexRank, ICML 2026) from one set of weights that holds every size{origin}.
"""


def write_cards(directory: Path, summary: Summary) -> list[Path]:
    """Writes the cards of a finished run's elastic model and deployed sizes; returns their paths."""
    places = [directory / "elastic", *(directory / export["directory"] for export in summary["deployed"])]
    write_text(places[0] / CARD, elastic_card(summary, cards.read_card_metadata(places[0] / CARD)))
    for place, export in zip(places[1:], summary["deployed"], strict=True):
        write_card(place, summary, export)
    return [place / CARD for place in places]


def write_card(
    place: Path, summary: Summary, export: Mapping[str, Any], tuned: int = 0, refitted: bool = False
) -> None:
    """Writes the card of one size of a finished run, exported to `place`; `tuned` is its steps of training alone."""
    write_text(place / CARD, deployed_card(summary, export, cards.read_card_metadata(place / CARD), tuned, refitted))


def elastic_card(summary: Summary, before: Mapping[str, Any]) -> str:
    """The card of the artefact that holds every size; `before` is the metadata of the card that it replaces."""
    middle = summary["rows"][len(summary["rows"]) // 2]["budget"]
    text = _ELASTIC.format(**_names(summary)) + _code(cards.ELASTIC_CODE, summary, place="elastic", budget=middle)
    return _metadata(summary, before) + text + _made(summary)


def deployed_card(
    summary: Summary, export: Mapping[str, Any], before: Mapping[str, Any], tuned: int = 0, refitted: bool = False
) -> str:
    """The card of one size; `export` is an entry of the summary's `deployed`, or what `export_one` returns."""
    budget, origin = export.get("budget"), ""
    if tuned:
        origin = f", then trained by itself for {tuned} steps; the table is of the others"
    elif refitted:
        origin = ". This one was then fitted by itself to the base model, without training; the table is of the others"
    elif budget in [row["budget"] for row in summary["rows"]]:
        origin = f"; it is the row {budget:g} of the table"
    share = export["relative_size"]
    facts = {"size": share if budget is None else budget, "share": share, "origin": origin}
    facts |= {"parameters": count(export["params_model"]), "layers": count(export["params_layers"])}
    code = _code(cards.DEPLOYED_CODE, summary, place=Path(export["directory"]).name)
    made = _made(summary, "The others were made" if refitted else "Made")
    return _metadata(summary, before) + _DEPLOYED.format(**_names(summary), **facts) + code + made


def _names(summary: Summary) -> dict[str, str]:
    model = str(summary["model"])
    return {"name": summary["name"], "model": f"`{Path(model).name if Path(model).is_dir() else model}`"}


def _code(text: str, summary: Summary, **facts: Any) -> str:
    kind = summary.get("auto_class") or CLASSES[summary["task"]]  # runs that were finished earlier do not say
    return f"\n```python\n{text.format(kind=kind, **facts)}\n```\n"


def _metadata(summary: Summary, before: Mapping[str, Any]) -> str:
    return cards.card_metadata(CLASSES[summary["task"]], str(summary["model"]), before)


def _made(summary: Summary, made: str = "Made") -> str:
    """The table of sizes, and how they were made."""
    table = cards.table(*table_cells(summary))
    steps, method = summary["distillation"]["steps"], summary["allocation"]["method"]
    factors = DECOMPOSITIONS[summary["decomposition"]["method"]]
    trained = f"{steps} steps of distillation from the base model" if steps else "no training"
    how = f"{made} by {factors}, {method} allocation of ranks for all budgets, and {trained}."
    return "\n".join(["\n## Sizes\n", *table, "", note(summary), "", how, cards.LICENCE, ""])
