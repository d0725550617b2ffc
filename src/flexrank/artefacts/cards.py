"""The model card (README.md) of an artefact, with the metadata that the hub reads.

No checksum covers it, because whoever publishes a model edits its card. What it says about the base model is copied
from the card of the model that the artefact was made from.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flexrank.hf.classes import auto_class
from flexrank.hf.companions import CARD, HUB_NAME, source_of
from flexrank.profiles import ProfileChain

#: The hub's name for a model's task, by the suffix of the model's class in transformers; the first that fits counts.
PIPELINES = {
    "ForCausalLM": "text-generation", "LMHeadModel": "text-generation", "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification", "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification", "ForQuestionAnswering": "question-answering",
    "ForSemanticSegmentation": "image-segmentation", "Model": "feature-extraction",
}  # fmt: skip
#: Keys about the base model's licence and language, copied unchanged from its card.
COPIED_KEYS = ("license", "license_name", "license_link", "language")
TAG = "flexrank"

ELASTIC_CODE = """import flexrank
from transformers import {kind}

size = flexrank.FlexRankConfig(budget={budget:g})  # or max_params=…, max_bytes=…
model = {kind}.from_pretrained("{place}", quantization_config=size)"""
DEPLOYED_CODE = """import flexrank  # teaches transformers the layers; trust_remote_code=True imports it too
from transformers import {kind}

model = {kind}.from_pretrained("{place}")"""
_CODE = {
    ("elastic", "transformers"): ELASTIC_CODE,
    ("elastic", "torch"): 'import flexrank\n\nmodel, chain = flexrank.load_elastic("{place}", budget={budget:g})',
    ("deployed", "transformers"): DEPLOYED_CODE,
    ("deployed", "torch"): 'import flexrank\n\nmodel = flexrank.load_deployed("{place}")',
}
SIZES = re.compile(r"^## Sizes\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
ABOUT = re.compile(r"^# ([^\n]+)\n(.*?)(?=^```|^## |\Z)", re.DOTALL | re.MULTILINE)
LICENCE = "The licence is that of the base model."
_COLUMNS = {
    "budget": "budget", "mean_rank": "mean rank", "params_layers": "params, layers", "params_model": "params, model",
    "bytes": "bytes", "predicted_error": "predicted error",
}  # fmt: skip


def write_elastic_card(directory: Path, description: Mapping[str, Any], chain: ProfileChain, model: Any) -> None:
    """Writes the card of an elastic artefact, with a table of its sizes; `description` is from `deployed.describe`."""
    rows = [[f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" for value in map(row.get, _COLUMNS)]
            for row in reversed(chain.sizes())]  # fmt: skip
    lead = "Every size from one set of weights, decomposed by flexrank (FlexRank, ICML 2026) into components in order "
    lead += "of importance. A size is the first components of each layer; only those are read."
    how = f"Ranks are those of {chain.method} allocation, for all budgets together."
    sizes = ["## Sizes", "", *(table(list(_COLUMNS.values()), rows) if rows else []), "", how]
    entries = chain.requested or chain.entries
    middle = entries[len(entries) // 2]
    budget = middle.requested or chain.relative_size(middle)
    _write_basic(directory, "elastic", description, model, lead, sizes, budget=budget)


def write_deployed_card(directory: Path, description: Mapping[str, Any], model: Any) -> None:
    """Writes the card of a deployed model; `description` is from `deployed.describe`."""
    ranks = [spec["rank"] for spec in description["layers"].values() if spec["form"] != "dense"]
    lead = f"{description['parameters']:,} parameters. flexrank (FlexRank, ICML 2026) cut it from weights that hold "
    lead += f"every size: {len(ranks)} of its layers are low-rank"
    lead += f", of ranks {min(ranks):,} to {max(ranks):,}." if ranks else "."
    share, sizes = getattr(model, "flexrank_share", None), getattr(model, "flexrank_sizes", "")
    lead += f" Its factorised layers have {share:.1%} of their dense parameters." if share is not None else ""
    lead += " Its row below, as it was cut, is in bold." if "| **" in sizes else ""
    _write_basic(directory, "deployed", description, model, lead, sizes.splitlines())


def read_about(card: Path) -> tuple[str, str]:
    """The title of a card, and its text up to the code or next heading; both empty without a card of this form."""
    text = card.read_text(encoding="utf8", errors="replace") if card.is_file() else ""
    found = ABOUT.search(text)
    return (found[1], found[2].strip()) if found else ("", "")


def read_sizes(directory: Path) -> str:
    """The section of a directory's card on the sizes and how they were made; empty if there is none."""
    card = directory / CARD
    found = SIZES.search(card.read_text(encoding="utf8", errors="replace")) if card.is_file() else None
    return found[0].replace(LICENCE, "").strip() if found else ""


def mark_size(sizes: str, chain: ProfileChain, profile: Mapping[str, int]) -> str:
    """The text that `read_sizes` returned, with the budget of this profile in bold."""
    for budget in [entry.requested for entry in chain.requested if entry.profile == profile]:
        for cell in (f"{budget:g}", f"{budget:.4g}"):  # as formatted in a run's card, and in an artefact's
            sizes = sizes.replace(f"\n| {cell} |", f"\n| **{cell}** |")
    return sizes


def _write_basic(
    directory: Path, what: str, description: Mapping[str, Any], model: Any, lead: str, more: list[str], **facts: float
) -> None:
    """Writes a card: a title, what the artefact is, the code that loads it, and more lines."""
    library, kind = description["library"], description["class"]
    is_hub = library == "transformers"
    source = source_of(model) if is_hub else None
    before = {} if source is None else read_card_metadata(source / CARD)
    start = card_metadata(kind, model.name_or_path, before) if is_hub else card_metadata("", "", {}, library="pytorch")
    named = auto_class(kind) if is_hub and what == "elastic" else kind  # only an Auto class loads an elastic artefact
    code = _CODE[what, library if named else "torch"].format(kind=named, place=".", **facts)
    lines = [f"# {kind}, {what}", "", lead, "", f"```python\n{code}\n```", "", *more, *[""] * bool(more), LICENCE, ""]
    (directory / CARD).write_text(start + "\n".join(lines), encoding="utf8")


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def card_metadata(kind: str, model: str, before: Mapping[str, Any], library: str = "transformers") -> str:
    """The metadata of a card, between lines of dashes.

    Args:
        kind: the name of the model's class, or of an auto class of transformers.
        model: what it was loaded from, which is named as the base model if it is a name on the hub.
        before: `read_card_metadata` of the card found there; if flexrank wrote it, its base model is named instead.
        library: what loads it.
    """
    is_named = HUB_NAME.fullmatch(model) is not None and not Path(model).exists()
    tags = before.get("tags")
    is_ours = isinstance(tags, list) and TAG in tags
    base = before.get("base_model") if is_ours else model if is_named else None
    pipeline = next((task for end, task in PIPELINES.items() if kind.endswith(end)), None)
    data = {name: before.get(name) for name in COPIED_KEYS}
    data |= {"library_name": library, "pipeline_tag": pipeline, "tags": [TAG, "low-rank"], "base_model": base}
    return f"---\n{yaml.safe_dump({key: value for key, value in data.items() if value}, sort_keys=False)}---\n"


def read_card_metadata(card: Path) -> dict[str, Any]:
    """The metadata of a card; empty if there is no card, or what it begins with is not a YAML mapping."""
    text = card.read_text(encoding="utf8", errors="replace") if card.is_file() else ""
    found = re.match(r"---\n(.*?)\n---(\s|$)", text, re.DOTALL)
    try:
        value = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, ValueError):  # a ValueError comes from a date that does not exist
        value = None
    return value if isinstance(value, dict) else {}
