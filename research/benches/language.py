"""Small Llamas: held-out nats per token at every budget, by plain SVD, DataSVD with both allocations, consolidated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank import distill_
from flexrank.data.batches import Batch
from flexrank.data.halves import Half, half_indices
from flexrank.data.metrics import nats_per_token
from flexrank.data.text import block_batches, read_texts, token_blocks
from flexrank.distill.objectives import LogitObjective
from flexrank.hf.models import hidden_states, load_model, load_tokenizer
from flexrank.run.training import autocast_dtype
from research.assets import assets_directory
from research.benches.quality import Subject, compare, quality_table, verdicts
from research.experiment import Experiment, Request
from research.measures import STORY_SEPARATOR, stories
from research.result import Result, measured

#: Numbers of blocks, blocks per batch, and levels of the probe.
CALIBRATION, PROBE, EVALUATION, TRAINING, BATCH, LEVELS = 128, 16, 100, 3000, 8, 6


#: A model, its texts as paths in the assets' folder, the separator of their documents, and tokens per block.
Texts = tuple[str, str, str, str, int]
STORIES: Texts = "stories260k", "text/tinystories_train_v2.txt", "text/tinystories_val.txt", STORY_SEPARATOR, 256
PYCODE: Texts = "pycode5m", "pycode5m/train_sample.txt", "pycode5m/val.txt", "\0", 512
#: A character-level model, only for comparisons with rivals.
CHARACTERS: Texts = "babyllama", "text/tinystories_train_v2.txt", "text/tinystories_val.txt", STORY_SEPARATOR, 256
MODELS = (STORIES, PYCODE, CHARACTERS)
#: The objective of consolidation; the probe's objective is the divergence alone.
FOLLOWED = LogitObjective(hidden_weight=4.0)
#: Goals by size: nats above the base model's.
RISES: dict[str, dict[float, float]] = {"pycode5m": {0.9: 0.0, 0.7: 0.005, 0.5: 0.035, 0.3: 0.165}}
CONSOLIDATION: dict[str, dict[str, Any]] = {
    "stories260k": {"steps": 1000, "learning_rate": 2e-3, "warmup_steps": 25},
    "pycode5m": {"steps": 450, "learning_rate": 2e-4, "warmup_steps": 10},
}


def run(request: Request) -> Result:
    """Runs the bench on every model."""
    data = {texts[0]: measure(texts, request) for texts in (STORIES, PYCODE)}
    tables = [
        quality_table(f"{model}: nats per token (dense {one['dense']['nats']:.4f})", one["results"], "nats")
        for model, one in data.items()
    ]
    claims = [
        one
        for model, of in data.items()
        for one in verdicts(model, of["results"], "nats", _goals(model, of["dense"]["nats"]), is_loss=True)
    ]
    return measured({name: CONSOLIDATION[name] for name in data} | {"seeds": request.seeds}, tables, claims, data)


def _goals(model: str, dense: float) -> dict[float, float]:
    return {budget: dense + rise for budget, rise in RISES.get(model, {}).items()}


def subject_of(
    texts: Texts, half: Half = "reporting", *, seed: int = 0, probe: int = PROBE, evaluation: int = EVALUATION
) -> tuple[Subject, Sequence[Batch]]:
    """Returns the model, scored on held-out blocks, and its training batches.

    Args:
        seed: above 0 it redraws calibration and probe from the training blocks; 0 takes the first of them.
        probe: number of blocks in the probe.
        evaluation: number of held-out blocks.
    """
    name, train, held_out_text, separator, length = texts
    assets = assets_directory(name, train, held_out_text)
    tokenizer = load_tokenizer(assets / name)

    def blocks(documents: Sequence[str], count: int, half: Half | None = None) -> Sequence[Batch]:
        (batch,) = token_blocks(tokenizer, documents, length, batch_size=1 << 40)
        rows = batch["input_ids"]
        rows = rows[half_indices(half, rows)][:count]
        if seed and half is None:
            rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
        return block_batches(rows, BATCH)

    training = blocks(read_texts(assets / train, separator), TRAINING)
    held_out = blocks(stories(assets / held_out_text), evaluation, half)
    calibration, probing = training[: CALIBRATION // BATCH], training[CALIBRATION // BATCH :][: -(-probe // BATCH)]

    def score(model: nn.Module) -> dict[str, float]:
        return {"nats": nats_per_token(model, held_out)}

    teacher = load_model(assets / name, "language")
    return Subject(teacher, calibration, probing, LogitObjective(), score), training


def measure(texts: Texts, request: Request) -> dict[str, Any]:
    """Returns the nats per token of the model, and by method and budget."""
    subject, training = subject_of(texts, request.half)
    settings = CONSOLIDATION[texts[0]]

    def train(model: nn.Module, profiles: Any, seed: int, path: Path) -> None:
        options = {"autocast": autocast_dtype("auto", torch.device("cpu")), "checkpoint": path, **settings}
        with hidden_states(model, subject.teacher):
            distill_(model, subject.teacher, training, profiles, objective=FOLLOWED, seed=seed, **options)

    facts = {"model": texts[0], "methods": ("svd", "datasvd", "fisher"), "levels": LEVELS}
    return compare(subject, facts, settings | {"followed": repr(FOLLOWED)}, request, train)


EXPERIMENT = Experiment(
    "language", "Quality: small Llamas",
    "held-out nats per token at every budget: plain SVD, DataSVD and ours with both allocations, and ours consolidated",
    minutes=45, full_minutes=110, has_halves=True, seeds=(3, 3), run=run,
)  # fmt: skip
