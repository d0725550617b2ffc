"""transformers models by name or directory. transformers is imported inside the functions that need it."""

import contextlib
import copy
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from flexrank.errors import FlexrankError
from flexrank.files import read_document, read_json, verify_files, write_json

Task = Literal["embedding", "language", "classification"]
TASKS: tuple[Task, ...] = ("embedding", "language", "classification")

#: A directory inside an installed package: "package:NAME/path".
PACKAGE_PREFIX = "package:"

#: Files of which a tokenizer has at least one.
TOKENIZER_FILES = ("tokenizer*.json", "tokenizer.model", "vocab.*", "spiece.model")

REMOTE_MODULE = "modeling_flexrank"
_REMOTE_CODE = '''"""Makes this model load with `trust_remote_code=True`; `import flexrank` first does the same."""

import flexrank  # noqa: F401
import transformers
'''


def resolve_source(name: str | Path) -> str:
    """The hub name or directory that `name` stands for; "package:NAME/path" is inside an installed package.

    Raises:
        FlexrankError: the package is not installed, or has no such directory; or a path does not exist.
    """
    name = str(name)
    if name.startswith(PACKAGE_PREFIX):
        package, _, inner = name.removeprefix(PACKAGE_PREFIX).partition("/")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            wanted = package.replace("_", "-")
            raise FlexrankError(f"model {name!r} needs the package {package!r}: pip install {wanted}")
        directory = Path(list(spec.submodule_search_locations)[0]) / inner
        if not directory.is_dir():
            raise FlexrankError(f"model {name!r}: the package {package!r} has no directory {inner!r}")
        return str(directory)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FlexrankError(f"model {name!r}: the directory has no config.json")
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FlexrankError(f"model {name!r}: no such directory")
    return name


def load_model(name: str | Path, task: Task, *, dtype: torch.dtype | None = torch.float32) -> Any:
    """A pretrained model in eval mode; one that `export` wrote is checked against its checksums first.

    Args:
        name: hub name, directory, or "package:NAME/path".
        task: embedding (`AutoModel`), language (`AutoModelForCausalLM`) or classification (of images or sequences,
            as the config says).
        dtype: of the weights; None keeps that of the file.

    Raises:
        FlexrankError: no such model, task or weights, or a damaged artefact.
    """
    source = resolve_source(name)
    if task not in TASKS:
        raise FlexrankError(f"task {task!r} is unknown; it is one of {', '.join(TASKS)}")
    verify_export(source)
    if (Path(source) / "elastic.json").is_file():
        raise FlexrankError(f"model {str(name)!r}: an elastic artefact; read it with load_elastic")
    with clear_errors(str(name)):
        auto_class = _auto_class(source, task)
        with quiet_loading():
            model = auto_class.from_pretrained(source, dtype="auto" if dtype is None else dtype, use_safetensors=True)
    return model.eval()


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer beside a model.

    Raises:
        FlexrankError: there is none.
    """
    import transformers

    source = resolve_source(name)
    # transformers makes an empty tokenizer up for a directory that has only a config.
    if Path(source).is_dir() and not any(any(Path(source).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise FlexrankError(f"model {str(name)!r}: the directory has no tokenizer")
    with clear_errors(str(name)):
        return transformers.AutoTokenizer.from_pretrained(source)


def load_by_architecture(directory: str | Path) -> tuple[Any, dict[str, Any]]:
    """The model of the class that `config.json` names, in its file's dtype, and transformers' report on the loading."""
    with clear_errors(str(directory)), quiet_loading():
        return _architecture(directory).from_pretrained(directory, output_loading_info=True, use_safetensors=True)


def skeleton(directory: str | Path) -> Any:
    """The model of the class that `config.json` names, with uninitialised weights but right non-persistent buffers.

    Built on the CPU without running any initialiser; on the meta device rotary frequencies would have no values.

    Raises:
        FlexrankError: there is no config, or it names a class that transformers does not have.
    """
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    architecture = _architecture(directory)
    with clear_errors(str(directory)):
        config = AutoConfig.from_pretrained(directory)
    with no_init_weights():
        model = architecture._from_config(config, dtype=config.dtype or torch.float32)
    model.tie_weights()
    if model.can_generate() and (Path(directory) / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


def meta_model(
    name: str | Path, task: Task, *, dtype: torch.dtype = torch.float32, architecture: str | Path | None = None
) -> Any:
    """The model that `load_model` would load, on the meta device: shapes without memory. Nothing is downloaded.

    Args:
        name: as for `load_model`; of a name on the hub the config must be in the local cache.
        task: as for `load_model`.
        dtype: of the weights that it stands for.
        architecture: a config.json to build in place of the model's own. Where transformers has no class of the task
            for it, the class that it names itself.

    Raises:
        FlexrankError: no such config, one of a compressed model, or no class for it.
    """
    import transformers

    config = _config_alone(name, architecture)
    auto_class = _class_for(task, config)
    if type(config) in auto_class._model_mapping:
        build = auto_class.from_config
    elif architecture is not None and (own := getattr(transformers, (config.architectures or [""])[0], None)):
        build = own._from_config
    else:
        raise FlexrankError(f"model {str(name)!r}: {auto_class.__name__} has no class for {config.model_type!r}")
    with clear_errors(str(architecture or name)), torch.device("meta"):
        return build(config, dtype=dtype).eval()


def meta_sample(model: Any, task: Task, length: int) -> dict[str, torch.Tensor]:
    """One sample on the meta device: `length` tokens, or an image of the size that the model was made for.

    Raises:
        FlexrankError: the model's config does not tell the size of its images.
    """
    if task != "classification":
        return {"input_ids": torch.zeros(1, length, dtype=torch.int64, device="meta")}
    side, channels = getattr(model.config, "image_size", None), getattr(model.config, "num_channels", 3)
    if side is None:
        raise FlexrankError(f"{type(model).__name__}: its config has no image_size, which a plan counts by")
    height, width = (side, side) if isinstance(side, int) else side
    return {"pixel_values": torch.zeros(1, channels, height, width, device="meta")}


def attention_width(model: Any) -> int:
    """Heads times their size, summed over the attention layers; 0 for a model whose config names no heads."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers * heads * size


@contextlib.contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """The model with attention as plain matrix products inside the block, and as it was after it.

    On a CPU, and for short texts, the backward pass of torch's fused attention takes far longer than the products.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def save_config(model: Any, directory: Path) -> None:
    """Writes the model's `config.json` (with its class and dtype) and generation config, without weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def save_model(model: Any, directory: Path, tokenizer: Any = None) -> None:
    """`save_pretrained`, and a modelling file that imports flexrank for those who load with `trust_remote_code`."""
    with quiet_loading():
        model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if attached_layers(model):
        _write_remote_code(model, directory)


def attach(model: Any, layers: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes a deployed transformers model save itself: its layers' specs go into `config.json`."""
    from flexrank.hf.quantizer import attach_config

    attach_config(model, layers)


def attached_layers(model: Any) -> dict[str, Any]:
    """The specs that `attach` gave the model; none if it was not attached."""
    from flexrank.hf.quantizer import is_attached

    return dict(model.hf_quantizer.quantization_config.layers) if is_attached(model) else {}


def is_transformers_model(model: object) -> bool:
    """Whether this is a `PreTrainedModel`; transformers is not imported to find out."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def verify_export(directory: str | Path) -> None:
    """Checks the files of a directory that `export` wrote; any other is left to its loader.

    Raises:
        FlexrankError: a file is missing, truncated or edited.
    """
    path = Path(directory) / "flexrank.json"
    if path.is_file():
        verify_files(directory, read_document(path, "deployed", ("files",))["files"])


@contextlib.contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Turns transformers' and safetensors' errors about what is on disk into one line.

    Raises:
        FlexrankError: no such model or file, or weights that do not fit the architecture.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except FlexrankError:
        raise
    except StrictDataclassError as error:  # a config's value; its first line alone does not tell which
        raise FlexrankError(f"model {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FlexrankError(f"model {name!r} cannot be loaded: {first}") from error


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bar while transformers loads or writes; as it was afterwards."""
    from transformers.utils import logging as hf_logging

    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()


def _architecture(directory: str | Path) -> Any:
    import transformers

    path = Path(directory) / "config.json"
    names = read_json(path).get("architectures") or []
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise FlexrankError(f"{path}: architectures {names} names no model class of transformers")
    return model_class


def _auto_class(source: str, task: Task) -> Any:
    import transformers

    return _class_for(task, transformers.AutoConfig.from_pretrained(source) if task == "classification" else None)


def _class_for(task: Task, config: Any) -> Any:
    """The auto class of a task; of images or sequences, as `config` has it, for classification."""
    import transformers

    if task == "embedding":
        return transformers.AutoModel
    if task == "language":
        return transformers.AutoModelForCausalLM
    image = transformers.AutoModelForImageClassification
    if any(name.endswith("ForImageClassification") for name in config.architectures or []):
        return image
    sequence = transformers.AutoModelForSequenceClassification
    return sequence if type(config) in sequence._model_mapping else image


def _config_alone(name: str | Path, architecture: str | Path | None) -> Any:
    """The config of a model, or the one given in its place, from this machine's files alone."""
    import transformers

    if architecture is not None and not Path(architecture).is_file():
        raise FlexrankError(f"architecture {str(architecture)!r}: no such file; it is a config.json of transformers")
    source = str(architecture) if architecture is not None else resolve_source(name)
    with clear_errors(source):
        try:
            config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
        except OSError as error:
            if Path(source).exists():
                raise
            raise FlexrankError(
                f"model {str(name)!r}: its config is not on this machine, and a dry run downloads nothing; name a "
                "config.json with the key architecture"
            ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise FlexrankError(f"model {source!r}: compressed already; a plan counts a dense model's layers")
    return config


def _write_remote_code(model: Any, directory: Path) -> None:
    """Adds `modeling_flexrank.py` and the `auto_map` that leads to it. The classes keep transformers' names."""
    classes = _auto_map(model)
    body = "".join(f"\n\nclass {name}(transformers.{name}):\n    pass\n" for name in dict.fromkeys(classes.values()))
    (directory / f"{REMOTE_MODULE}.py").write_text(_REMOTE_CODE + body, encoding="utf8")
    config = read_json(directory / "config.json")
    config["auto_map"] = {auto: f"{REMOTE_MODULE}.{name}" for auto, name in classes.items()}
    write_json(directory / "config.json", config)


def _auto_map(model: Any) -> dict[str, str]:
    """Auto class to the model class it loads for this config: that of the model itself, and of its bare base."""
    from transformers.models.auto import modeling_auto

    wanted = {type(model).__name__, type(model.base_model).__name__}
    found = {}
    for name, auto_class in vars(modeling_auto).items():
        mapping = getattr(auto_class, "_model_mapping", None)
        if name.startswith("AutoModel") and mapping is not None and type(model.config) in mapping:
            target = mapping[type(model.config)]
            names = [kind.__name__ for kind in (target if isinstance(target, tuple) else (target,))]
            if kinds := [kind for kind in names if kind in wanted]:
                found[name] = kinds[0]
    return found
