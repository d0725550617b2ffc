"""The data of each stage of a run: batches by task, and how the table's qualities are measured.

Calibration, training and evaluation take disjoint parts; the probe takes other samples of calibration's part, if there
are enough. The training part of a stream is read while a model trains.
"""

import dataclasses
import itertools
import logging
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.data.batches import Batch, batch_rows, token_mask
from flexrank.data.halves import half_indices, select_half
from flexrank.data.images import ImageBatches, Scaling, channels_first, read_images
from flexrank.data.metrics import embed, mean_cosine, nats_per_token, predict, retrieval_mrr
from flexrank.data.stdlib_docs import stdlib_corpus
from flexrank.data.stream import StreamedBatches, TextStream, block_maker, held_out_texts, open_texts, sentence_maker
from flexrank.data.text import (
    SPLITS,
    Tokenizer,
    block_batches,
    joined_tokens,
    read_texts,
    sentence_batches,
    token_blocks,
)
from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.run.config import RunConfig

# A separator that no text contains, so that a file is read as one text.
NO_SEPARATOR = "\0"
#: What a running text is divided into: lines, and long ones at a blank.
PIECE = re.compile(r"[^\n]{0,4096}[^\s]*\s?")
#: Texts of a stream that are read together when training keeps their order.
UNSHUFFLED = 64
log = logging.getLogger("flexrank")

#: Measures a model's qualities.
QualityFunction = Callable[[nn.Module], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Samples:
    """The data of a run; the same in every process."""

    calibration: Sequence[Batch]
    probe: Sequence[Batch]
    training: Iterable[Batch]  # a sequence, unless texts are a stream
    example: Batch  # evaluation samples, for timing and for checking an export
    quality_function: Callable[[nn.Module], QualityFunction]  # given the teacher; it reads the evaluation samples
    classes: Tensor | None = None  # of all images


def load_samples(config: RunConfig, tokenizer: Tokenizer | None) -> Samples:
    """Loads the samples of a run; images are scaled as preprocessor_config.json beside the model's weights says.

    Raises:
        FlexrankError: the data cannot be read, or calibration is shorter than one batch.
    """
    if config.task == "classification":
        images, labels = read_images(config.data.path or "")
        scaling = Scaling.read(models.file_beside(config.model, "preprocessor_config.json"))
        return _image_samples(config, channels_first(images), scaling, torch.from_numpy(labels))
    if tokenizer is None:
        raise FlexrankError(f"task {config.task!r} needs a tokenizer beside the model {config.model!r}")
    build = _block_samples if config.task == "language" else _text_samples
    return build(config, tokenizer)


def loss_rows(task: str, batches: Sequence[Batch]) -> int:
    """The number of rows that the loss averages over: real tokens (language), texts, or images."""
    if task == "language":
        return sum(int(mask.sum()) for batch in batches if (mask := token_mask(batch)) is not None)
    return sum(map(batch_rows, batches))


def _text_samples(config: RunConfig, tokenizer: Tokenizer) -> Samples:
    """Padded texts for encoders, judged by `cosine` to the teacher and, if the data has pairs, by `mrr`."""
    data = config.data
    calibration, training, queries, documents = _split_texts(config, tokenizer)
    chosen = select_half(data.half, range(len(queries)), lambda index: queries[index])[: data.evaluation]
    held_out = [part[index] for part in (queries, documents) if part for index in chosen]

    def batches(texts: Sequence[str], batch_size: int = data.batch_size, seed: int | None = None) -> Sequence[Batch]:
        return sentence_batches(tokenizer, texts, batch_size, data.max_tokens, seed)

    def quality_function(teacher: nn.Module) -> QualityFunction:
        evaluation = batches(held_out)
        targets = embed(teacher, evaluation)

        def qualities(model: nn.Module) -> dict[str, float]:
            embeddings = embed(model, evaluation)
            mrr = {"mrr": retrieval_mrr(*embeddings.split(len(embeddings) // 2))} if documents else {}
            return {"cosine": mean_cosine(embeddings, targets), **mrr}

        return qualities

    examples = batches(held_out, config.evaluation.latency_batch_size)
    example = examples[(len(examples) - 1) // 2]  # sorted by length: of medium length, and not the short last batch
    size = config.distillation.batch_size
    consolidation: Iterable[Batch]
    if isinstance(training, TextStream):
        window = -(-max(data.shuffle_buffer, 1) // size) * size  # a whole number of batches
        make = sentence_maker(tokenizer, data.max_tokens, size, config.seed)
        consolidation = StreamedBatches(training, make, window)
    else:
        consolidation = batches(training[: data.training], size, config.seed)
    return _samples(config, calibration, batches, consolidation, example, quality_function)


def _block_samples(config: RunConfig, tokenizer: Tokenizer) -> Samples:
    """Full blocks of tokens for causal language models, judged by `nats_per_token`."""
    data = config.data
    calibration, training, evaluation, documents = _split_texts(config, tokenizer)
    if documents:
        evaluation = [f"{query}\n\n{document}" for query, document in zip(evaluation, documents, strict=True)]

    def blocks(part: str, texts: Sequence[str]) -> Tensor:
        try:
            (batch,) = token_blocks(tokenizer, texts, data.max_tokens, batch_size=1 << 40)
        except FlexrankError as error:
            raise FlexrankError(f"{part} part of the data: {error}") from error
        rows = batch["input_ids"]
        # A prefix of shuffled blocks is a fair sample. Of a stream only as many texts are read as the blocks need, so
        # its blocks keep their order: the first ones are then the same for any number of blocks.
        return rows if data.is_stream else rows[_shuffled(len(rows), config.seed)]

    held_out = blocks("evaluation", evaluation)
    held_out = held_out[half_indices(data.half, held_out)][: data.evaluation]

    def batches(rows: Tensor, batch_size: int = data.batch_size) -> Sequence[Batch]:
        return block_batches(rows, batch_size)

    def quality_function(_: nn.Module) -> QualityFunction:
        return lambda model: {"nats_per_token": nats_per_token(model, batches(held_out))}

    example = batches(held_out, config.evaluation.latency_batch_size)[0]
    size, seed = config.distillation.batch_size, config.seed if data.shuffle_buffer else None
    consolidation: Iterable[Batch]
    if isinstance(training, TextStream):
        make = block_maker(tokenizer, data.max_tokens, size, seed)
        consolidation = StreamedBatches(training, make, data.shuffle_buffer or UNSHUFFLED)
    else:
        consolidation = batches(blocks("training", training)[: data.training], size)
    return _samples(config, blocks("calibration", calibration), batches, consolidation, example, quality_function)


def _image_samples(config: RunConfig, images: Tensor, scaling: Scaling, labels: Tensor) -> Samples:
    """Images, bytes (N, C, H, W), with classes (N,), judged by `accuracy` and `agreement` with the teacher."""
    calibration, training, held_out = _split(_shuffled(len(images), config.seed))
    chosen = select_half(config.data.half, held_out, lambda index: scaling(images[index].unsqueeze(0)))
    held_out = torch.stack(chosen[: config.data.evaluation])

    def batches(indices: Tensor, batch_size: int = config.data.batch_size) -> Sequence[Batch]:
        return ImageBatches(images, scaling, indices, batch_size)

    def quality_function(teacher: nn.Module) -> QualityFunction:
        targets = predict(teacher, batches(held_out))

        def qualities(model: nn.Module) -> dict[str, float]:
            classes = predict(model, batches(held_out))
            return {
                "accuracy": float((classes == labels[held_out]).double().mean()),
                "agreement": float((classes == targets).double().mean()),
            }

        return qualities

    example = batches(held_out, config.evaluation.latency_batch_size)[0]
    consolidation = batches(training[: config.data.training], config.distillation.batch_size)
    samples = _samples(config, calibration, batches, consolidation, example, quality_function)
    return dataclasses.replace(samples, classes=labels)


def _samples(
    config: RunConfig,
    calibration: Any,
    batches: Callable[[Any], Sequence[Batch]],
    training: Iterable[Batch],
    example: Batch,
    quality_function: Callable[[nn.Module], QualityFunction],
) -> Samples:
    """The samples of a run; `batches` makes batches of the calibration part, for calibration and for the probe.

    If that part has too few samples, the probe takes the last ones, of which calibration has some too.
    """
    data, wanted = config.data, config.data.calibration + config.data.probe
    first, probe = calibration[: data.calibration], calibration[data.calibration : wanted]
    if len(first) < data.batch_size:
        samples = f"{len(first)} samples are shorter than one batch of {data.batch_size} (data.batch_size)"
        length = f", a data.max_tokens below {data.max_tokens}" if config.task == "language" else ""
        raise FlexrankError(f"data.calibration: {samples}; give more data{length}, or smaller batches")
    if len(calibration) < wanted:
        found = "data: %d samples for calibration and probe, which take %d; some serve both"
        log.info(found, len(calibration), wanted)
        probe = calibration[-data.probe :]
    return Samples(batches(first), batches(probe), training, example, quality_function)


def _split_texts(
    config: RunConfig, tokenizer: Tokenizer
) -> tuple[list[str], list[str] | TextStream, list[str], list[str]]:
    """Texts for calibration, training and evaluation, and the documents paired with the evaluation texts, if any.

    If evaluation has a file of its own, calibration and training share all of the others. No text is in two parts.
    """
    if config.data.is_stream:
        return *_split_stream(config, tokenizer), []
    if config.data.source == "stdlib-docs":
        corpus = stdlib_corpus()
        queries, documents = zip(*corpus.evaluation, strict=True)
        return list(corpus.calibration), list(corpus.training), list(queries), list(documents)
    path, held_out = config.data.path or "", config.data.held_out
    is_running = config.task == "language" and config.data.separator is None
    pieces = _read_pieces(config, path, is_running, apart=held_out)
    parts = _split(pieces)
    if held_out is not None:
        parts = [parts[0], parts[1] + parts[2], _read_pieces(config, held_out, is_running)]
    parts = [_running_texts(part) for part in parts] if is_running else _without_repeats(*parts)
    for name, part in zip(SPLITS, parts, strict=True):
        if not part:
            found = f"{path}: the {'lines' if is_running else 'texts'} are too few ({len(pieces)})"
            separator = config.data.separator
            right = "give more, or a separator" if separator is None else f"are they separated by {separator!r}?"
            raise FlexrankError(f"{found}, none is left for {name}; {right}")
        if not is_running:
            random.Random(config.seed).shuffle(part)
    calibration, training, evaluation = parts
    return calibration, training, evaluation, []


def _without_repeats(calibration: Sequence[str], training: Sequence[str], evaluation: list[str]) -> list[list[str]]:
    """The parts, without texts that evaluation has too, and training without those of calibration."""
    held_out = set(evaluation)
    calibration = [text for text in calibration if text not in held_out]
    used = held_out.union(calibration)
    return [calibration, [text for text in training if text not in used], evaluation]


def _split_stream(config: RunConfig, tokenizer: Tokenizer) -> tuple[list[str], TextStream, list[str]]:
    """Texts for calibration, the stream, and texts for evaluation: as many first texts of each part as are needed."""
    data = config.data
    names = {"column": data.column, "subset": data.subset, "split": data.split, "revision": data.revision}
    stream = open_texts(data.source, data.path or "", tokenizer, separator=data.separator or "\n", **names)
    # Twice as many as are evaluated on, so either half is enough.
    needs = {"calibration": data.calibration + data.probe, "evaluation": 2 * data.evaluation}
    if config.task == "language":
        tokens = {name: need * data.max_tokens for name, need in needs.items()}
        parts = held_out_texts(stream, tokens, lambda text: len(joined_tokens(tokenizer, [text])))
    else:
        parts = held_out_texts(stream, needs, lambda _: 1)
    return parts["calibration"], stream, parts["evaluation"]


def _read_pieces(config: RunConfig, path: str, is_running: bool, apart: str | None = None) -> list[str]:
    """The texts of all files but `apart`; of running texts, pieces of them joined by NO_SEPARATOR."""
    texts = read_texts(path, NO_SEPARATOR if is_running else config.data.separator or "\n", apart)
    return [piece for piece in PIECE.findall(f"\n{NO_SEPARATOR}".join(texts)) if piece] if is_running else texts


def _running_texts(pieces: Sequence[str]) -> list[str]:
    """The texts, one of each file, that these pieces of `_read_pieces` are part of."""
    return [text.removesuffix("\n") for text in "".join(pieces).split(NO_SEPARATOR) if text.strip()]


def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")


def _split(items: Any) -> list[Any]:
    """The parts of a sequence for calibration, training and evaluation."""
    ends = [round(len(items) * share / sum(SPLITS.values())) for share in itertools.accumulate(SPLITS.values())]
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
