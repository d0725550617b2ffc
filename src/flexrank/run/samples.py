"""What each stage of a run sees: batches by task, and the qualities that the table shows.

The parts for calibration, training and evaluation never meet. Calibration and probe share one part and take different
samples of it where it is large enough.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.data.batches import Batch
from flexrank.data.images import Scaling, channels_first, read_images
from flexrank.data.metrics import embed, mean_cosine, nats_per_token, predict, retrieval_mrr
from flexrank.data.text import SPLITS, Tokenizer, read_texts, sentence_batches, stdlib_corpus, token_blocks
from flexrank.errors import FlexrankError
from flexrank.run.config import RunConfig

# No text holds it, so reading with it leaves a file whole.
NO_SEPARATOR = "\0"


Judge = Callable[[nn.Module], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Samples:
    """The data of a run; the same in every process.

    Attributes:
        calibration: batches for the moments.
        probe: batches that one probe evaluates.
        training: batches for consolidation.
        example: one batch of evaluation samples, for timing and for checking an export.
        judge: given the teacher, what measures a model's qualities over the evaluation samples.
    """

    calibration: Sequence[Batch]
    probe: Sequence[Batch]
    training: Sequence[Batch]
    example: Batch
    judge: Callable[[nn.Module], Judge]


def load_samples(config: RunConfig, directory: str, tokenizer: Tokenizer | None) -> Samples:
    """The samples of a run.

    Args:
        config: its `task`, `data`, and batch sizes.
        directory: of the model, where the images' mean and deviation stand.
        tokenizer: of the model; None for images.

    Raises:
        FlexrankError: the data cannot be read, or calibration is shorter than one batch.
    """
    if config.task == "classification":
        return _image_samples(config, *_read_images(Path(config.data.path or ""), Path(directory)))
    if tokenizer is None:
        raise FlexrankError(f"task {config.task!r} needs a tokenizer beside the model {config.model!r}")
    build = _block_samples if config.task == "language" else _text_samples
    return build(config, tokenizer)


def take_probe(items: Any, calibration: int, probe: int) -> Any:
    """The samples after those of calibration, or the last ones where too few are left."""
    after = items[calibration : calibration + probe]
    return after if len(after) == probe else items[-probe:]


def _require_batch(have: int, config: RunConfig) -> None:
    if have < config.data.batch_size:
        raise FlexrankError(
            f"data.calibration: {have} samples are shorter than one batch of {config.data.batch_size}"
            " (data.batch_size); give more data, or smaller batches"
        )


def _text_samples(config: RunConfig, tokenizer: Tokenizer) -> Samples:
    """Padded texts for encoders; `cosine` to the teacher, and `mrr` where the data has pairs."""
    data = config.data
    calibration, training, queries, documents = (
        _stdlib_texts() if data.source == "stdlib-docs" else _split_texts(config)
    )
    held_out = [*queries[: data.evaluation], *documents[: data.evaluation]]
    _require_batch(len(calibration[: data.calibration]), config)

    def batches(texts: Sequence[str], batch_size: int = data.batch_size, seed: int | None = None) -> Sequence[Batch]:
        return sentence_batches(tokenizer, texts, batch_size, data.max_tokens, seed)

    def judge(teacher: nn.Module) -> Judge:
        evaluation = batches(held_out)
        wanted = embed(teacher, evaluation)

        def qualities(model: nn.Module) -> dict[str, float]:
            found = embed(model, evaluation)
            result = {"cosine": mean_cosine(found, wanted)}
            if documents:
                result["mrr"] = retrieval_mrr(*found.split(len(found) // 2))
            return result

        return qualities

    examples = batches(held_out, config.evaluation.latency_batch_size)
    return Samples(
        calibration=batches(calibration[: data.calibration]),
        probe=batches(take_probe(calibration, data.calibration, data.probe)),
        training=batches(training[: data.training], config.distillation.batch_size, config.seed),
        example=examples[len(examples) // 2],  # by length: texts of middling length
        judge=judge,
    )


def _block_samples(config: RunConfig, tokenizer: Tokenizer) -> Samples:
    """Full blocks of tokens for causal language models; `nats_per_token`."""
    data = config.data
    if data.source == "stdlib-docs":
        calibration, training, queries, documents = _stdlib_texts()
        evaluation = [f"{query}\n\n{document}" for query, document in zip(queries, documents, strict=True)]
    else:
        calibration, training, evaluation, _ = _split_texts(config)

    def blocks(part: str, texts: Sequence[str]) -> Tensor:
        try:
            (batch,) = token_blocks(tokenizer, texts, data.max_tokens, batch_size=1 << 40)
        except FlexrankError as error:
            raise FlexrankError(f"{part} part of the data: {error}") from error
        rows = batch["input_ids"]  # shuffled, so that a prefix is fair
        return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(config.seed))]

    def batches(rows: Tensor, batch_size: int = data.batch_size) -> list[Batch]:
        return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in rows.split(batch_size)]

    first, held_out = blocks("calibration", calibration), blocks("evaluation", evaluation)[: data.evaluation]
    _require_batch(len(first[: data.calibration]), config)

    def judge(_: nn.Module) -> Judge:
        return lambda model: {"nats_per_token": nats_per_token(model, batches(held_out))}

    return Samples(
        calibration=batches(first[: data.calibration]),
        probe=batches(take_probe(first, data.calibration, data.probe)),
        training=batches(blocks("training", training)[: data.training], config.distillation.batch_size),
        example=batches(held_out, config.evaluation.latency_batch_size)[0],
        judge=judge,
    )


def _image_samples(config: RunConfig, images: Tensor, labels: Tensor) -> Samples:
    """Images (N, C, H, W) and classes (N,); `accuracy`, and `agreement` with the teacher."""
    data = config.data
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(config.seed))
    first, training, held_out = (order[start:end] for start, end in _bounds(len(order)))
    held_out = held_out[: data.evaluation]
    _require_batch(len(first[: data.calibration]), config)

    def batches(rows: Tensor, batch_size: int = data.batch_size) -> list[Batch]:
        return [{"pixel_values": images[part]} for part in rows.split(batch_size)]

    def judge(teacher: nn.Module) -> Judge:
        theirs = predict(teacher, batches(held_out))

        def qualities(model: nn.Module) -> dict[str, float]:
            classes = predict(model, batches(held_out))
            return {
                "accuracy": float((classes == labels[held_out]).double().mean()),
                "agreement": float((classes == theirs).double().mean()),
            }

        return qualities

    return Samples(
        calibration=batches(first[: data.calibration]),
        probe=batches(take_probe(first, data.calibration, data.probe)),
        training=batches(training[: data.training], config.distillation.batch_size),
        example=batches(held_out, config.evaluation.latency_batch_size)[0],
        judge=judge,
    )


def _stdlib_texts() -> tuple[list[str], list[str], list[str], list[str]]:
    """Texts for calibration and training, and the pairs of evaluation."""
    corpus = stdlib_corpus()
    queries, documents = zip(*corpus.evaluation, strict=True)
    return list(corpus.calibration), list(corpus.training), list(queries), list(documents)


def _split_texts(config: RunConfig) -> tuple[list[str], list[str], list[str], list[str]]:
    """Three runs of a file's texts, the calibration's first and the evaluation's last; no pairs.

    A file of its own for the evaluation leaves the whole of the other to calibration and training.
    """
    path, held_out = config.data.path or "", config.data.held_out
    running = config.task == "language" and config.data.separator is None
    pieces = _read_pieces(config, path, running)
    parts = [pieces[start:end] for start, end in _bounds(len(pieces))]
    if held_out is not None:
        parts = [parts[0], parts[1] + parts[2], _read_pieces(config, held_out, running)]
    for name, part in zip(SPLITS, parts, strict=True):
        if not part:
            raise FlexrankError(f"{path}: has {len(pieces)} texts, none is left for {name}; give more, or a separator")
    if running:
        return ["\n".join(parts[0])], ["\n".join(parts[1])], ["\n".join(parts[2])], []
    for part in parts:
        random.Random(config.seed).shuffle(part)
    return parts[0], parts[1], parts[2], []


def _read_pieces(config: RunConfig, path: str, running: bool) -> list[str]:
    """A file's texts; of one running text, its lines."""
    texts = read_texts(path, NO_SEPARATOR if running else config.data.separator or "\n")
    return [line for text in texts for line in text.splitlines()] if running else texts


def _bounds(count: int) -> list[tuple[int, int]]:
    """Where calibration, training and evaluation begin and end among `count` samples."""
    shares = list(SPLITS.values())
    ends = [round(count * sum(shares[: number + 1]) / sum(shares)) for number in range(len(shares))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _read_images(path: Path, directory: Path) -> tuple[Tensor, Tensor]:
    """Images as the model's preprocessor_config.json scales them, and their classes."""
    images, labels = read_images(path)
    scaling = Scaling.read(directory / "preprocessor_config.json")
    return scaling(channels_first(images)), torch.from_numpy(labels)
