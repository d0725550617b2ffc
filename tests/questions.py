"""Questions with options as tasks of lm-eval, and a plain loop that answers them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

QUESTIONS = [
    ("the quick brown", [" fox", " dogs"], 0),
    ("jumps over 3 lazy", [" cats", " dogs", " fox number"], 1),
    ("and 4", [" cats", " lazy dogs", " the quick", " fox"], 0),
    ("number 12 jumps", [" under", " over"], 1),
    ("the quick", [" brown cats", " dogs and"], 0),
]


def write_tasks(place: Path, *names: str, questions: Sequence[Any] = QUESTIONS) -> dict[str, Any]:
    """Writes task files of these names, which ask the same; returns what they have in common."""
    lines = [json.dumps({"text": text, "options": options, "gold": gold}) for text, options, gold in questions]
    (file := place / f"{names[0]}.jsonl").write_text("\n".join(lines))
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    task = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
        "doc_to_choice": "{{options}}", "doc_to_target": "{{gold}}", "target_delimiter": "",
        "metric_list": metrics,
    }  # fmt: skip
    for name in names:
        (place / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **task}))
    return task


@torch.no_grad()
def answers(model: Any, tokenizer: Any) -> dict[str, float]:
    """The shares of questions whose right option is likeliest: in all, and for each of its characters."""
    plain, normed = [], []
    for text, options, gold in QUESTIONS:
        likelihoods = []
        for option in options:
            start, ids = len(tokenizer(text)["input_ids"]), tokenizer(text + option)["input_ids"]
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            likelihoods.append(sum(float(logits[place - 1, ids[place]]) for place in range(start, len(ids))))
        lengths = map(len, options)
        plain.append(max(range(len(options)), key=likelihoods.__getitem__) == gold)
        by_character = [one / length for one, length in zip(likelihoods, lengths, strict=True)]
        normed.append(max(range(len(options)), key=by_character.__getitem__) == gold)
    return {"acc": sum(plain) / len(plain), "acc_norm": sum(normed) / len(normed)}
