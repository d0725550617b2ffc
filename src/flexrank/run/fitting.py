"""Refuses, before anything is calibrated, texts and images that a run's model was not made for."""

import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from flexrank.errors import FlexrankError
from flexrank.hf.classes import reads_both_sides
from flexrank.run.config import RunConfig
from flexrank.run.workspace import Workspace


def require_fitting(config: RunConfig, model: Any) -> None:
    """Refuses a transformers model that cannot read such texts, or texts of this length."""
    if config.task == "embedding" and getattr(model.config, "is_encoder_decoder", False):
        kind = f"{model.config.model_type!r}, an encoder-decoder"
        raise FlexrankError(f"task 'embedding' does not fit {kind}; take a model that is an encoder alone")
    if config.task == "language" and reads_both_sides(model.config):
        kind = f"{model.config.model_type!r}, which reads later tokens too"
        raise FlexrankError(f"task 'language' does not fit {kind}; take a causal model, or task 'embedding'")
    if config.task == "classification" and "pixel_values" not in inspect.signature(model.forward).parameters:
        kind = f"{type(model).__name__}, which reads {model.main_input_name}"
        raise FlexrankError(f"task 'classification' is of images, and does not fit {kind}; compress it from Python")
    limit, tokens = most_tokens(model), config.data.max_tokens
    if config.task != "classification" and limit is not None and tokens > limit:
        raise FlexrankError(f"data.max_tokens is {tokens}; this model reads at most {limit}")


def most_tokens(model: nn.Module) -> int | None:
    """The most tokens that a transformers model reads; None if its configuration does not say.

    In RoBERTa and its kin the first token has the position after that of padding.
    """
    config: Any = model.config
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.num_embeddings == limit:
            return limit if module.padding_idx is None else limit - module.padding_idx - 1
    return limit


def require_fitting_inputs(work: Workspace, model: Any) -> None:
    """Refuses texts or images that a transformers model was not made for."""
    require_fitting(work.config, model)
    if work.config.task == "classification":
        _require_fitting_images(work, model.config)
    else:
        _require_known_tokens(work, model.config)


def _require_fitting_images(work: Workspace, config: Any) -> None:
    """Refuses images of another size, and classes that the model has no output for."""
    place, side = f"data.path {work.config.data.path}", getattr(config, "image_size", None)
    samples: Any = work.samples
    shape = tuple(samples.example["pixel_values"].shape[1:])
    sides = (side, side) if isinstance(side, int) else shape[1:]
    wanted = (getattr(config, "num_channels", shape[0]), *sides)
    if shape != wanted:
        raise FlexrankError(f"{place}: images are {shape} (channels, height, width); this model takes {wanted}")
    for found in samples.classes.aminmax():
        if not 0 <= found < config.num_labels:
            raise FlexrankError(f"{place}: y has the class {found}; this model's are 0 to {config.num_labels - 1}")


def _require_known_tokens(work: Workspace, config: Any) -> None:
    """Refuses tokens that the model has no embedding for; a stream's training texts are not checked."""
    samples, known = work.samples, getattr(config.get_text_config(), "vocab_size", math.inf)  # some read any character
    training = samples.training if isinstance(samples.training, Sequence) else ()
    batches: Any = itertools.chain(samples.calibration, samples.probe, training, [samples.example])
    largest = max(int(batch["input_ids"].max()) for batch in batches)
    if largest >= known:
        wrong = f"its tokenizer makes token {largest}, and its embedding ends at {known - 1}"
        mend = "save the model's own tokenizer with it, or enlarge the embedding (resize_token_embeddings)"
        raise FlexrankError(f"model {work.config.model!r}: {wrong}; {mend}")
