"""transformers models built from their config alone, for dry runs: on the meta device, without weights."""

from pathlib import Path
from typing import Any

import torch

from flexrank.errors import FlexrankError, first_line
from flexrank.hf.classes import Task, class_for
from flexrank.hf.models import clear_errors, require_dense, resolve_source


def meta_model(
    name: str | Path, task: Task, *, dtype: torch.dtype = torch.float32, architecture: str | Path | None = None
) -> Any:
    """The model that `load_model` would load, on the meta device: shapes without memory.

    Of a model on the hub only config.json is downloaded, unless it is in the cache.

    `architecture` is a config.json to use in place of the model's own. If transformers has no class of the task for it,
    the class that it names is used.

    Raises:
        FlexrankError: there is no such config, the model is compressed, or no class fits.
    """
    import transformers

    config = _config_of(name, architecture)
    auto_class = class_for(task, config)
    if type(config) in auto_class._model_mapping:
        build = auto_class.from_config
    elif architecture is not None and (own := getattr(transformers, (config.architectures or [""])[0], None)):
        build = own._from_config
    else:
        problem = f"{auto_class.__name__} has no class for {config.model_type!r}; correct task or model"
        raise FlexrankError(f"model {str(name)!r}: {problem}")
    with clear_errors(str(architecture or name)), torch.device("meta"):
        return build(config, dtype=dtype).eval()


def file_dtype(name: str | Path, architecture: str | Path | None = None) -> torch.dtype:
    """The dtype of the model's files according to its config; float32 if it names none. Raises as `meta_model` does."""
    dtype = _config_of(name, architecture).dtype
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype or "float32")


def meta_sample(model: Any, task: Task, length: int) -> dict[str, torch.Tensor]:
    """One sample on the meta device: `length` tokens, or an image of the size in the model's config."""
    if task != "classification":
        return {"input_ids": torch.zeros(1, length, dtype=torch.int64, device="meta")}
    side, channels = getattr(model.config, "image_size", None), getattr(model.config, "num_channels", 3)
    if side is None:
        raise FlexrankError(f"{type(model).__name__}: its config has no image_size, which a dry run counts by")
    height, width = (side, side) if isinstance(side, int) else side
    return {"pixel_values": torch.zeros(1, channels, height, width, device="meta")}


def attention_width(model: Any) -> int:
    """Heads times head size, summed over the attention layers; 0 for a model whose config has no single number."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers * heads * size


def _config_of(name: str | Path, architecture: str | Path | None) -> Any:
    """Reads the config of a model, or the `architecture` in its place, without its weights."""
    import transformers

    if architecture is not None and not Path(architecture).is_file():
        raise FlexrankError(f"architecture {str(architecture)!r}: no such file; it is a config.json of transformers")
    source = str(architecture) if architecture is not None else resolve_source(name)
    with clear_errors(source):
        try:
            config = transformers.AutoConfig.from_pretrained(source)
        except OSError as error:
            if Path(source).exists():
                raise
            mend = "a config.json here can be named with the key architecture"
            raise FlexrankError(f"model {str(name)!r}: {first_line(error).rstrip('.')}; {mend}") from error
    if (Path(source) / "elastic.json").is_file():
        raise FlexrankError(f"model {str(name)!r}: an elastic artefact; name the dense model from which it was made")
    require_dense(config, source)
    return config
