"""Makes transformers' `from_pretrained` cut a size from an elastic artefact, and deploy it.

`AutoModelForCausalLM.from_pretrained("elastic/", quantization_config=fr.FlexRankConfig(budget=0.4))` reads only the
components of that size, and returns the model that `deploy` makes of them. Importing this module registers the
quantizer.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from flexrank.artefacts.elastic import read_elastic_document
from flexrank.deployment.limits import deploy_within_limits
from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.hf.classes import auto_class
from flexrank.hf.companions import complete_snapshot, local_directory
from flexrank.hf.quantizer import (
    OrdinaryModelQuantizer,
    attach,
    forget_quantization,
    match_layers,
    require_head,
    specs_that_fit,
)
from flexrank.nn.experts import separate_as_recorded_
from flexrank.nn.gauge_aligned import Slack
from flexrank.nn.select import replace_layers

ELASTIC_QUANT_METHOD = "flexrank_elastic"
#: Attributes of a model: the tensors that transformers leaves out of its report of missing and unexpected ones.
REPORTED = ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected")
log = logging.getLogger("flexrank")


@register_quantization_config(ELASTIC_QUANT_METHOD)
class ElasticConfig(QuantizationConfigMixin):
    """The config that `deployment.FlexRankConfig` returns."""

    def __init__(self, limits: Mapping[str, Any], slack: Slack = "auto", **ignored: Any):
        self.quant_method = ELASTIC_QUANT_METHOD
        self.limits = dict(limits)
        self.slack = slack


@register_quantizer(ELASTIC_QUANT_METHOD)
class ElasticQuantizer(OrdinaryModelQuantizer):
    """Leaves the layers empty in the model that transformers builds, and then fills it with a deployed size."""

    quantization_config: ElasticConfig
    _directory: Path
    _reported: dict[str, Any]

    def update_attn_implementation(self, config: Any) -> Any:
        """Tells transformers the artefact's file: this is the only call with the config before it looks for weights.

        Raises:
            FlexrankError: the class that loads is not an Auto class, and so does not say from where; or the artefact is
                not of a transformers model.
        """
        if not config.name_or_path:
            kind = next(iter(config.architectures or ["this class"]))
            auto = auto_class(kind)
            mend = f"take {auto}.from_pretrained" if auto else "read it with flexrank.load_elastic"
            raise FlexrankError(f"{kind}.from_pretrained cannot cut a size; {mend}")
        directory = local_directory(config.name_or_path)
        document = read_elastic_document(directory)
        if document["library"] != "transformers":
            raise FlexrankError(f"{directory}: not a transformers model; read it with load_elastic")
        config.transformers_weights = next(iter(document["shards"]))
        return config

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        del model.config.transformers_weights
        # Only now is it known where transformers found the file: `revision` or another model's `config` may change it.
        self._directory = complete_snapshot(Path(kwargs["checkpoint_files"][0]).parent)
        separate_as_recorded_(model)
        layers = specs_that_fit(model, read_elastic_document(self._directory)["layers"], only_heads_differ=True)
        chosen = {id(model.get_submodule(name)) for name in layers}
        for name, module in model.named_modules(remove_duplicate=False):
            parts = name.split(".") if id(module) in chosen else ()
            for end in range(len(parts)):  # else modules around read the shapes of what is empty from here on
                vars(model.get_submodule(".".join(parts[:end])))["_is_hf_initialized"] = True
        replace_layers(model, {name: _Empty() for name in layers})
        # Switches off transformers' report on tensors: all come from the artefact's own reader, after this.
        self._reported = {name: getattr(model, name) for name in REPORTED}
        for name in REPORTED:
            setattr(model, name, {".*"})
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, patterns in self._reported.items():
            setattr(model, name, patterns)
        if len({*map(str, getattr(model, "hf_device_map", {}).values())}) > 1:
            mend = "write the size with `flexrank deploy`, and load that with this device_map"
            raise FlexrankError(f"device_map names several devices, but a size is cut on one; {mend}")
        settings = self.quantization_config
        small, entry = deploy_within_limits(
            self._directory, settings.limits, dtype=model.dtype, device=model.device, slack=settings.slack
        )
        _fill(model, small, entry.profile)
        forget_quantization(model)
        return model


class _Empty(nn.Module):
    """A placeholder for a layer; it has a weight because GPT-2's initialiser asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0), persistent=False)


def _fill(model: Any, small: Any, layers: Iterable[str]) -> None:
    """Moves a deployed model's layers and tensors into a model of its architecture, which may have another head."""
    layers = {name: small.get_submodule(name) for name in layers}
    own = {id(inner) for layer in layers.values() for inner in layer.modules()}
    deployed = {name: one for name, one in match_layers(model, layers) if isinstance(model.get_submodule(name), _Empty)}
    others = {
        name: one for name, one in small.named_modules() if id(one) not in own and (one._parameters or one._buffers)
    }
    filled = {id(parameter) for parameter in small.parameters()}
    for name, module in match_layers(model, others, skip_missing=True):
        _fill_module(model, name, module)
    replace_layers(model, deployed)
    attach(model, {name: spec for name, spec in match_layers(model, models.attached_layers(small)) if name in deployed})
    model.flexrank_sizes, model.flexrank_share = small.flexrank_sizes, small.flexrank_share
    model.tie_weights()
    drawn = [name for name, parameter in model.named_parameters() if id(parameter) not in filled]
    if drawn:
        log.warning("%s: not in the artefact, and newly initialised: %s", type(model).__name__, ", ".join(drawn))


def _fill_module(model: Any, name: str, module: nn.Module) -> None:
    """Moves the tensors of a deployed model's module into that of this name, if they have the same shapes."""
    there = model.get_submodule(name)
    # These follow from the config that the model is loaded with; but initialisers of what holds the layers did not run.
    made = () if any(isinstance(one, _Empty) for one in there.modules()) else there._non_persistent_buffers_set
    for own, given in ((there._parameters, module._parameters), (there._buffers, module._buffers)):
        for key, tensor in given.items():
            if key in made or tensor is None or own.get(key) is None:
                continue
            if own[key].shape == tensor.shape:
                own[key] = tensor
            else:
                require_head(model, f"{name}.{key}")
