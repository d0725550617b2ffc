"""Registers flexrank's quantizer with transformers, without importing transformers.

After `import flexrank`, `AutoModel.from_pretrained` loads deployed models. If transformers' registry of quantizers is
not imported yet, an import hook registers flexrank as soon as it is.
"""

import importlib
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from typing import Any

#: transformers' registry of quantizers, which every load of a model imports.
REGISTRY = "transformers.quantizers.auto"


def register() -> None:
    """Registers flexrank's quantizer with transformers now, or as soon as its registry is imported."""
    if REGISTRY in sys.modules:
        _register_now()
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def _register_now() -> None:
    try:
        importlib.import_module("flexrank.hf.quantizer")
    except ImportError as error:
        warnings.warn(f"flexrank cannot load its models here, it needs transformers>=5.23,<6: {error}", stacklevel=2)


class _RegistryFinder:  # without importlib.abc, whose import takes longer than all of this package
    """Finds the registry through the other finders, and makes its loader register flexrank after running the module."""

    def find_spec(self, fullname: str, path: Any, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _RegistryFinder))
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None:
            _register_after(spec.loader)
        return spec


def _register_after(loader: Any) -> None:
    execute = loader.exec_module

    def execute_and_register(module: types.ModuleType) -> None:
        execute(module)
        if module.__name__ == REGISTRY:
            _register_now()

    loader.exec_module = execute_and_register


register()
