"""Which class of transformers a model has, or is loaded by."""

import re
from typing import Any, Literal

import torch

from flexrank.errors import FlexrankError

Task = Literal["embedding", "language", "classification"]
TASKS: tuple[Task, ...] = ("embedding", "language", "classification")


def class_for(task: Task, config: Any) -> Any:
    """The auto class of a task; for classification, that of images or of sequences, as `config` says.

    Raises FlexrankError for the language task of an encoder-decoder, whose decoder is no language model by itself.
    """
    import transformers

    named = config.architectures or []
    if task == "embedding":
        encoder = transformers.AutoModelForTextEncoding
        is_half = type(config) in encoder._model_mapping and any(name.endswith("EncoderModel") for name in named)
        return encoder if is_half else transformers.AutoModel  # half of an encoder-decoder
    if task == "language":
        if getattr(config, "is_encoder_decoder", False):
            mend = "take a causal model, or compress it from Python"
            name = config.name_or_path or config.model_type
            raise FlexrankError(f"model {name!r}: an encoder-decoder, which task 'language' does not fit; {mend}")
        return transformers.AutoModelForCausalLM
    is_image = any(name.endswith("ForImageClassification") for name in named)
    sequence = transformers.AutoModelForSequenceClassification
    is_sequence = not is_image and type(config) in sequence._model_mapping
    return sequence if is_sequence else transformers.AutoModelForImageClassification


def reads_both_sides(config: Any) -> bool:
    """Whether a language model sees later tokens too, as BERT does unless it is set to be a decoder."""
    import transformers

    is_causal = getattr(config, "is_decoder", getattr(config, "causal", True))
    return type(config) in transformers.AutoModelForMaskedLM._model_mapping and not is_causal


def auto_class(kind: str) -> str | None:
    """The Auto class of transformers that loads a model class of this name; None if no Auto class does."""
    found = []
    for name, mapping in _auto_classes().items():
        values = mapping._model_mapping.values()
        if any(kind in ((value,) if isinstance(value, str) else value) for value in values):
            found.append(name)
    return min(found, key=_preference, default=None)


def _preference(name: str) -> tuple[int, str]:
    """Sorts first the Auto class whose heads fit what a model that several of them load is for."""
    preferred = ("AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel")
    others = len(preferred) + (name == "AutoModelForPreTraining")
    return (preferred.index(name) if name in preferred else others), name


def _auto_classes() -> dict[str, Any]:
    """The Auto classes of models, by name, with their tables of classes by configuration."""
    from transformers.models.auto import modeling_auto

    tables = {name: getattr(one, "_model_mapping", None) for name, one in vars(modeling_auto).items()}
    return {name: table for name, table in tables.items() if name.startswith("AutoModel") and table is not None}


def auto_map(model: Any) -> dict[str, str]:
    """The class that each Auto class loads for this config: the model's, its `base_model`'s, or one of another head."""
    wanted = {type(model).__name__, type(model.base_model).__name__}
    classes = {}
    for name, mapping in _auto_classes().items():
        if type(model.config) in mapping:
            target = mapping[type(model.config)]
            names = [kind.__name__ for kind in (target if isinstance(target, tuple) else (target,))]
            classes[name] = next((kind for kind in names if kind in wanted), names[0])
    return classes


def names_in_float32(model: Any, dtype: torch.dtype | None) -> set[str]:
    """The names of the tensors that transformers keeps in float32 in a model of this dtype; none of other models."""
    parts = set[str]()
    if dtype in (torch.float16, torch.bfloat16):
        parts |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        parts |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {name for name in model.state_dict() if any(re.search(rf"(^|\.){part}($|\.)", name) for part in parts)}
