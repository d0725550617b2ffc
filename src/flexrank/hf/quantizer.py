"""Loads deployed models as quantized models of transformers: their layers are swapped before the weights load.

The layers' specs are in `config.json` under `quantization_config`. Importing this module registers the quantizer.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from flexrank.errors import FlexrankError
from flexrank.files import dtype_name, read_json
from flexrank.hf import models
from flexrank.hf.remote_code import REMOTE_MODULE
from flexrank.nn.experts import separate_as_recorded_
from flexrank.nn.gauge_aligned import GaugeAlignedLayer
from flexrank.nn.matrix import is_layer, matrix_shape
from flexrank.nn.quantised import NOTED, flatten_quantised, is_quantised, part_names
from flexrank.nn.select import replace_layers
from flexrank.nn.specs import FORMAT, build_layer, layer_spec, require_format, require_specs

Item = TypeVar("Item")
log = logging.getLogger("flexrank")


@register_quantization_config(models.QUANT_METHOD)
class DeployedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a deployed model: each layer's `specs.layer_spec` by name, and the specs' format.

    An elastic model's is refused only when a model is loaded with it: lm-eval makes one for any model it is given.
    """

    is_elastic = False

    def __init__(self, layers: Mapping[str, Mapping[str, Any]], format: int = FORMAT, **ignored: Any):
        require_format(format)
        require_specs(layers)
        self.quant_method = models.QUANT_METHOD
        self.format = format
        self.layers = {name: dict(spec) for name, spec in layers.items()}
        if ignored.get("is_elastic"):  # from `mark_elastic`; a deployed model's file has no such key
            self.is_elastic = True


class OrdinaryModelQuantizer(HfQuantizer):
    """A quantizer whose loaded model is an ordinary module: it can be saved, trained and compiled."""

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:  # noqa: D102
        return True

    @property
    def is_trainable(self) -> bool:  # noqa: D102
        return True

    @property
    def is_compileable(self) -> bool:  # noqa: D102
        return True


@register_quantizer(models.QUANT_METHOD)
class DeployedQuantizer(OrdinaryModelQuantizer):
    """Swaps the layers of a model that is still on the meta device; the weights then load into them by name."""

    quantization_config: DeployedConfig
    metadata: Mapping[str, str] = {}  # torchao's notes, from the files of a size that was quantised when it was saved

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """A quantised size's tensors, taken apart; called by `save_pretrained`, before it writes the config."""
        state = model.state_dict()
        self.quantization_config.layers = _present_specs(model, self.quantization_config.layers)
        _keep_layers_apart_(model, self.quantization_config.layers)
        if not is_quantised(state):
            return None, {}
        _untie_quantised_head_(model)
        return flatten_quantised(state)

    @property
    def serialized_names(self) -> dict[str, list[str]]:
        """The endings of the names of what a quantised weight is stored as, by the ending of the weight's own name."""
        found = dict[str, list[str]]()
        for name, parts in part_names(self.metadata).items():
            endings = found.setdefault(name.rpartition(".")[2], [])
            endings += {part.rpartition(".")[2] for part in parts} - set(endings)
        return found

    def get_load_operations(self) -> dict[str, Any]:  # noqa: D102
        if not self.metadata:
            return {}
        from flexrank.hf.quantised import Deserialize

        return {"deserialize": Deserialize}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.quantization_config.is_elastic:
            raise FlexrankError("save_pretrained wrote these factors of an elastic model; save it with fr.save_elastic")
        if files := kwargs.get("checkpoint_files"):
            models.verify_export(Path(files[0]).parent, {"config.json", *(Path(file).name for file in files)})
            config = Path(files[0]).parent / "config.json"  # the user may have passed another config
            _warn_of_lower_precision(model, config.is_file() and read_json(config).get("dtype") or "float32")
            self.metadata = _torchao_notes(files)
        separate_as_recorded_(model)
        # transformers sets the default device (meta) and dtype around this call.
        specs = specs_that_fit(model, self.quantization_config.layers)
        # Under this model's names; layers that it lacks, or that have another shape, are not named when it is saved.
        self.quantization_config.layers = {name: dict(spec) for name, spec in specs.items()}
        layers = {name: build_layer(spec) for name, spec in specs.items()}
        for layer in layers.values():
            vars(layer)["_is_hf_initialized"] = True  # some initialisers go by the name of a class, and read its weight
        replace_layers(model, layers)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        own = getattr(model.config, "auto_map", None) or {}
        if any(str(name).startswith(f"{REMOTE_MODULE}.") for name in own.values()):
            del model.config.auto_map  # `save_pretrained` would keep it, but not write the module that it names
        forget_quantization(model)
        if self.metadata:
            _finish_quantised_(model)
        return model


def _finish_quantised_(model: Any) -> None:
    """Gives a loaded model's quantised layers the model's dtype, and makes it fit to be saved again."""
    for module in model.modules():
        if is_quantised(dict(module.named_parameters(recurse=False))):
            module.to(model.dtype)
    # `save_pretrained` takes tensors apart itself, and cannot undo what put them together.
    model._weight_conversions = [
        conversion
        for conversion in model._weight_conversions
        if not any(hasattr(operation, "hf_quantizer") for operation in getattr(conversion, "operations", ()))
    ]


def _present_specs(model: Any, specs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The specs of the layers that the model has now: since it was deployed, some may have been removed or replaced."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, GaugeAlignedLayer):
            found[name] = layer_spec(module)
        elif name in specs and specs[name]["form"] == "dense" and is_layer(module):
            found[name] = {**specs[name], "shape": list(matrix_shape(module))}
    return found


def _keep_layers_apart_(model: Any, layers: Iterable[str]) -> None:
    """Leaves the deployed layers' tensors as they are in `save_pretrained`.

    Its conversions join the weights of some layers, such as q, k and v, or permute their rows; of factors this is
    wrong.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # the model was not loaded: as transformers finds them, in `revert_weight_conversion`
        found = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [one for one in found if not isinstance(one, PrefixChange)]
    own = [f"{name}.{key}" for name in layers for key in model.get_submodule(name).state_dict()]
    model._weight_conversions = [one for one in conversions if not _changes_values(one, own)]


def _changes_values(conversion: Any, names: Iterable[str]) -> bool:
    """Whether this conversion, undone as a model is saved, makes other tensors of some with these names."""
    if not isinstance(conversion, WeightConverter):
        return False
    undone = conversion.reverse_transform()
    return any(undone.rename_source_key(name)[1] is not None for name in names)


def _untie_quantised_head_(model: Any) -> None:
    """Notes in the configs that quantising has untied head and embedding, which transformers would tie again.

    Raises FlexrankError if they still share a quantised tensor, or if the class ties more than these two: transformers
    unties all or nothing, and the files hold each shared tensor once.
    """
    state, tied = model.state_dict(keep_vars=True), model.all_tied_weights_keys
    own = {name: state[name] for pair in tied.items() for name in pair if name in state}
    if not is_quantised(own):
        return
    if len(tied) > 1 or len(set(map(id, own.values()))) == 1:
        tie = f"{type(model).__name__} ties {', '.join(tied)}"
        raise FlexrankError(f"{tie}, which cannot be saved quantised; leave its head and embedding unquantised")
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False


def _torchao_notes(files: Iterable[str]) -> dict[str, str]:
    """The notes of torchao in these files' headers; empty if nothing is quantised."""
    notes = dict[str, str]()
    for path in (one for one in files if one.endswith(".safetensors")):
        with safe_open(path, framework="pt") as file:
            notes |= file.metadata() or {}
    return notes if NOTED in notes else {}


def _warn_of_lower_precision(model: Any, own: str) -> None:
    """Warns that a model is loaded in a less precise dtype than it was deployed in: its slack is too small for that."""
    asked = dtype_name(model.dtype)
    if torch.finfo(model.dtype).eps > torch.finfo(getattr(torch, own)).eps:
        way = "for which its slack is too small; deploy it in that dtype"
        log.warning("deployed in %s and loaded in %s, %s", own, asked, way)


def forget_quantization(model: Any) -> None:
    """Lets a loaded model be trained and cast, as its tensors allow; transformers forbids it for quantized models."""
    model.is_quantized = False
    for module in model.modules():
        if hasattr(module, "config"):
            vars(module.config).pop("_is_quantized", None)


def match_layers(model: Any, items: Mapping[str, Item], *, skip_missing: bool = False) -> Iterator[tuple[str, Item]]:
    """Yields the items of an artefact's layers, under the layers' names in this model.

    A model with a head may load the artefact of one without: names gain `base_model_prefix`. A model without a head may
    load that of one with a head: names lose the prefix, and the head's layers are skipped. So are layers of a part of
    the base model, such as a pooler, that this class has not; a layer missing inside a part is an error.
    """
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    modules = dict(model.named_modules())
    from_head = bool(prefix) and any(name.startswith(prefix) for name in items)
    parts = dict(model.base_model.named_children())
    for name, item in items.items():
        candidates: tuple[str, ...] = (name, name.removeprefix(prefix), prefix + name)
        if prefix and name == "" and not from_head:  # the base model itself, which is a part here
            candidates = (model.base_model_prefix, "")
        elif prefix == f"{name}." and model.base_model is model:
            candidates = ("",)
        present = next((candidate for candidate in candidates if candidate in modules), None)
        if present is not None:
            yield present, item
        elif not skip_missing and (name.startswith(prefix) or not from_head):
            if name.removeprefix(prefix).partition(".")[0] not in parts:
                log.info("%s has no %s, whose values in the artefact are left out", type(model).__name__, name)
                continue
            kind, right = type(model).__name__, "load it with the class and the configuration that were saved"
            raise FlexrankError(f"{kind} has no layer {name!r}, which config.json says is deployed; {right}")


def specs_that_fit(
    model: Any, specs: Mapping[str, Mapping[str, Any]], only_heads_differ: bool = False
) -> dict[str, Mapping[str, Any]]:
    """The specs of the layers that `match_layers` finds and that have the same shape in this model.

    All others, such as a head with other classes, stay transformers' own layers, newly initialised. With
    `only_heads_differ` they must be of a head; otherwise transformers refuses the shapes as it reads the weights.
    """
    found, matched = {}, dict(match_layers(model, specs))
    if specs and not matched:
        kind, right = type(model).__name__, "load it with the class that was saved"
        raise FlexrankError(f"{kind} has none of the layers that config.json says are deployed; {right}")
    for name, spec in matched.items():
        shape = matrix_shape(model.get_submodule(name))
        if shape == tuple(spec["shape"]):
            found[name] = spec
            continue
        if only_heads_differ:
            require_head(model, name)
        if spec["form"] != "dense":  # else it is transformers' own layer in the file too, of the shape that it has
            log.warning("%s is %s here and %s in the artefact: newly initialised", name, shape, tuple(spec["shape"]))
    return found


def require_head(model: Any, name: str) -> None:
    """Raises FlexrankError if this name, of a layer or tensor of another shape, is not of the model's head."""
    part = name.partition(".")[0]
    is_alone = model.base_model is model and not is_layer(model.get_submodule(part))  # some classes name no base model
    if is_alone or part == model.base_model_prefix:
        wrong = f"{name} has another shape than in the artefact"
        raise FlexrankError(f"{type(model).__name__}: {wrong}; only a head may differ, so load it by its own config")


def attach(model: Any, layers: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes `model.save_pretrained` write these layers' specs, beside those that are attached already."""
    config = DeployedConfig({**models.attached_layers(model), **layers})
    model.hf_quantizer = DeployedQuantizer(config, pre_quantized=True)
    model.config.quantization_config = config
