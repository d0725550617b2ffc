"""Glue to transformers, which is never imported from here: what needs it registers when somebody else imports it.

`import flexrank` suffices for `AutoModel.from_pretrained` to load a deployed model, whichever of the two is imported
first: the quantizer is registered at once where transformers' registry is loaded, and right after it loads elsewhere.
"""

import importlib
import sys
import types
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

#: The module that holds transformers' registry of quantizers; it is imported by everything that loads a model.
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


class _RegistryFinder:  # no importlib.abc: importing that takes longer than all of this package
    """Finds the registry as the other finders do, with a loader that registers after the module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _RegistryFinder) else finder.find_spec(fullname, path, target)
            if spec is not None:
                loader: Any = _RegisteringLoader(spec.loader)
                spec.loader = loader
                return spec
        return None


class _RegisteringLoader:
    """The registry's own loader in everything else."""

    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register_now()


register()
