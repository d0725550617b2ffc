"""transformers models by name or directory: loading, saving, and skeletons.

Every function that needs transformers imports it first, so the error names transformers if it is missing.
"""

import contextlib
import copy
import importlib.util
import logging
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from flexrank.errors import FlexrankError, first_line, is_out_of_memory
from flexrank.files import clear_write_errors, dtype_name, read_document, read_json
from flexrank.hf.classes import TASKS, Task, class_for
from flexrank.hf.companions import TOKENIZER_FILES, verify_artefact
from flexrank.hf.remote_code import write_remote_code

log = logging.getLogger("flexrank")

#: transformers' name for the "quantization" of deployed models.
QUANT_METHOD = "flexrank"
#: What an elastic model's config has in place of layers' specs.
ELASTIC_MARK = {"quant_method": QUANT_METHOD, "layers": {}, "is_elastic": True}
#: The prefix of a directory inside an installed package: "package:NAME/path".
PACKAGE_PREFIX = "package:"
#: `no_init_weights` replaces functions of torch and transformers, for all threads, until it ends.
_BUILDING = threading.Lock()


def resolve_source(name: str | Path) -> str:
    """The existing directory of a path, or of "package:NAME/path" in an installed package; a hub name as it is."""
    name = str(name)
    if name.startswith(PACKAGE_PREFIX):
        return _package_directory(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            mend = "merge it into its base model (merge_and_unload), save that, and name it"
            raise FlexrankError(f"model {name!r}: holds an adapter of peft; {mend}")
        if not (path / "config.json").is_file():
            raise FlexrankError(f"model {name!r}: the directory has no config.json; give what save_pretrained wrote")
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        found = "is a file; give the directory that save_pretrained wrote" if path.exists() else "no such directory"
        raise FlexrankError(f"model {name!r}: {found}")
    return name


def _package_directory(name: str) -> str:
    package, _, inner = name.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise FlexrankError(f"model {name!r} needs the package {package!r}: pip install {package.replace('_', '-')}")
    directory = Path(list(spec.submodule_search_locations)[0]) / inner
    if not directory.is_dir():
        raise FlexrankError(f"model {name!r}: the package {package!r} has no directory {inner!r}")
    return str(directory)


def load_model(
    name: str | Path, task: Task, *, dtype: torch.dtype | None = torch.float32, only_dense: bool = False
) -> Any:
    """Loads a pretrained model in eval mode; the checksums of an export are checked first.

    Args:
        name: hub name, directory, or "package:NAME/path".
        task: embedding (`AutoModel`), language (`AutoModelForCausalLM`) or classification (of images or sequences,
            as the config says).
        dtype: None keeps that of the files.
        only_dense: refuses a compressed model, such as a deployed size.

    Raises:
        FlexrankError: there is no such model or task, weights are missing, or the artefact is damaged or elastic.
    """
    import transformers

    source = resolve_source(name)
    if task not in TASKS:
        raise FlexrankError(f"task {task!r} is unknown; it is one of {', '.join(TASKS)}")
    verify_export(source)
    if (Path(source) / "elastic.json").is_file():
        right = "name the dense model from which it was made, or read it with load_elastic"
        raise FlexrankError(f"model {str(name)!r}: an elastic artefact; {right}")
    with clear_errors(str(name), source), quiet_loading():
        config = transformers.AutoConfig.from_pretrained(source)
        if only_dense:
            require_dense(config, source)
        options = {"dtype": dtype or "auto", "use_safetensors": True, "output_loading_info": True}
        model, report = class_for(task, config).from_pretrained(source, **options)
    _require_weights(str(name), task, report["missing_keys"])
    return model.eval()


def require_dense(config: Any, name: str) -> None:
    """Refuses the config of a model whose weights are compressed: they are no matrices that can be decomposed."""
    if getattr(config, "quantization_config", None) is not None:
        raise FlexrankError(f"model {name!r}: already compressed; name the dense model from which it was made")


def _require_weights(name: str, task: Task, missing: Collection[str]) -> None:
    """Refuses randomly initialised weights, except those of an encoder's pooler, which mean pooling does not read."""
    unread = {key for key in missing if task == "embedding" and key.startswith("pooler.")}
    if unread:
        log.warning("model %r: its files have no pooler, whose values are random; mean pooling does not read it", name)
    for key in sorted(set(missing) - unread):
        raise FlexrankError(f"model {name!r}: its files have no {key}; take a model that was trained for {task}")


def load_tokenizer(name: str | Path) -> Any:
    """Loads the tokenizer beside a model; raises FlexrankError if there is none."""
    import transformers

    source = resolve_source(name)
    # transformers invents an empty tokenizer for a directory that has only a config.
    if Path(source).is_dir() and not any(any(Path(source).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise FlexrankError(f"model {str(name)!r}: the directory has no tokenizer; save the model's own there")
    with clear_errors(str(name), source):
        return transformers.AutoTokenizer.from_pretrained(source)


def file_beside(name: str | Path, file: str) -> Path:
    """The path of a file beside a model's weights; that of a model on the hub is fetched into its cache.

    Raises FlexrankError if the hub has no such file, or cannot be reached.
    """
    import transformers

    source = resolve_source(name)
    if Path(source).is_dir():
        return Path(source, file)
    try:
        return Path(transformers.utils.cached_file(source, file))
    except OSError as error:
        raise FlexrankError(f"model {str(name)!r}: no {file}, here or on the hub ({first_line(error)})") from error


def load_by_architecture(directory: str | Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Loads the class that `config.json` names, in its files' dtype; returns the model and transformers' report.

    `options` are those of `from_pretrained`.
    """
    options |= {"output_loading_info": True, "use_safetensors": True}
    with clear_errors(str(directory)), quiet_loading():
        return _architecture(directory).from_pretrained(directory, **options)


def skeleton(directory: str | Path) -> Any:
    """The model of the class that `config.json` names, with uninitialised weights and correct non-persistent buffers.

    It is built on the CPU, without initialisers: on the meta device rotary frequencies would have no values.
    """
    import transformers
    from transformers.initialization import no_init_weights

    architecture = _architecture(directory)
    with clear_errors(str(directory)):
        config = transformers.AutoConfig.from_pretrained(directory)
    with _BUILDING, no_init_weights():
        model = architecture._from_config(config, dtype=config.dtype or torch.float32)
    model.tie_weights()
    if model.can_generate() and (Path(directory) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model.eval()


@contextlib.contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Uses eager attention inside the block: on a CPU the backward pass of fused attention is slow."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def other_attention(model: Any) -> dict[str, str]:
    """The option of `from_pretrained` for a model whose attention is not the default; rows of padding depend on it."""
    attention = model.config._attn_implementation
    return {} if attention in (None, "sdpa") else {"attn_implementation": attention}


@contextlib.contextmanager
def hidden_states(*models: Any) -> Iterator[None]:
    """Makes the models return their hidden states inside the block."""
    configs = [config for model in models for config in (model.config, model.config.get_text_config())]
    before = [config.output_hidden_states for config in configs]
    for config in configs:
        config.output_hidden_states = True
    try:
        yield
    finally:
        for config, returned in zip(configs, before, strict=True):
            config.output_hidden_states = returned


def save_config(model: Any, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Writes the model's `config.json`, with its class and `dtype` (by default its own), and its generation config."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype_name(dtype or model.dtype)
    if getattr(config, "quantization_config", None) == ELASTIC_MARK:
        del config.quantization_config
    if hasattr(config, "auto_map"):  # it names files of code beside the base model, which are not here
        del config.auto_map
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def save_model(model: Any, directory: Path) -> None:
    """As `save_pretrained`; a deployed model also gets a file that imports flexrank, for `trust_remote_code=True`."""
    # With several processes, transformers lets only the first write; here each has its own directories.
    model.__dict__["should_save_on_this_rank"] = lambda is_main_process: is_main_process
    try:
        with quiet_loading(), clear_write_errors(directory):
            model.save_pretrained(directory)
    finally:
        del model.__dict__["should_save_on_this_rank"]
    if attached_layers(model):
        write_remote_code(model, directory)


def mark_elastic(model: Any) -> None:
    """Makes `from_pretrained` refuse an elastic model that `save_pretrained` wrote: it would initialise new layers.

    `deploy` replaces the mark by the specs of a size. A model that is not transformers' stays as it is. The model gets
    its own copy of the config, because it may share the config with a base model.
    """
    if is_transformers_model(model):
        shared, own = model.config, copy.copy(model.config)
        own.quantization_config = dict(ELASTIC_MARK)
        for module in model.modules():
            if getattr(module, "config", None) is shared:
                module.config = own


def attached_layers(model: Any) -> dict[str, Any]:
    """The specs that `quantizer.attach` gave the model; empty if it gave none."""
    config: Any = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return dict(config.layers) if getattr(config, "quant_method", None) == QUANT_METHOD else {}


def is_transformers_model(model: object) -> bool:
    """Whether this is a `PreTrainedModel`; does not import transformers to find out."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def library_of(model: object) -> str:
    """`transformers` for a model of a class that transformers has, and so can build from its config; else `torch`."""
    is_known = is_transformers_model(model) and hasattr(sys.modules["transformers"], type(model).__name__)
    return "transformers" if is_known else "torch"


def verify_export(directory: str | Path, names: Collection[str] | None = None) -> None:
    """Raises FlexrankError if files that `export` wrote (all, or `names`) have changed; other directories pass."""
    path = Path(directory) / "flexrank.json"
    if path.is_file():
        digests = read_document(path, "deployed", ("files",))["files"]
        wanted = {name: digests[name] for name in digests if names is None or name in names}
        verify_artefact(Path(directory), wanted, "truncated, edited, or saved over (then delete flexrank.json)")


@contextlib.contextmanager
def clear_errors(name: str, source: str = "") -> Iterator[None]:
    """Turns whatever transformers, tokenizers and safetensors raise about a model into a FlexrankError of one line.

    A `source` that is no directory is said to be looked for on the hub.
    """
    import transformers  # noqa: F401, before its dependency: where both are missing, the error names transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (FlexrankError, ImportError):  # a missing package has a line of its own
        raise
    except StrictDataclassError as error:  # about a value of the config, which its first line does not name
        raise FlexrankError(f"model {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    except Exception as error:  # of a kind of config that is too new for it, a library may raise anything
        if is_out_of_memory(error):
            raise
        has_words = isinstance(error, (OSError, ValueError, RuntimeError, SafetensorError))
        words = first_line(error) if has_words else f"{type(error).__name__}: {first_line(error)}"
        is_remote = source and not Path(source).is_dir()
        where = "; it is no directory here, so it was looked for on the hub" if is_remote else ""
        raise FlexrankError(f"model {name!r} cannot be loaded: {words.rstrip('.')}{where}") from error


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Inside the block transformers shows no progress bars."""
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
    model_class = getattr(transformers, names[0] if names else "", None)
    if model_class is None:
        right = "correct it, or upgrade transformers"
        raise FlexrankError(f"{path}: architectures {names} names no model class of transformers; {right}")
    return model_class
