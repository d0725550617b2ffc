"""The module beside a deployed model that makes it load with `trust_remote_code=True`: it imports flexrank."""

from pathlib import Path
from typing import Any

from flexrank.files import read_json, write_json
from flexrank.hf.classes import auto_map

#: The module's name, and how it begins.
REMOTE_MODULE = "modeling_flexrank"
_REMOTE_CODE = '''"""Makes this model load with `trust_remote_code=True`; `import flexrank` first does the same."""

import flexrank  # noqa: F401
import transformers
'''
#: For tools that read the config before the model, such as lm-eval: it is transformers' own.
_REMOTE_CONFIG = """

class {name}(transformers.{name}):
    pass
"""
#: Of custom code transformers would not convert the names of tensors, as it does of its own classes.
_REMOTE_CLASS = """

class {name}(transformers.{name}):
    @classmethod
    def is_custom_code(cls):
        return False
"""


def write_remote_code(model: Any, directory: Path) -> None:
    """Writes `modeling_flexrank.py`, whose classes keep transformers' names, and the `auto_map` that names them."""
    import transformers

    classes = auto_map(model)
    body = "".join(_REMOTE_CLASS.format(name=name) for name in dict.fromkeys(classes.values()))
    if hasattr(transformers, name := type(model.config).__name__):
        body += _REMOTE_CONFIG.format(name=name)
        classes["AutoConfig"] = name
    (directory / f"{REMOTE_MODULE}.py").write_text(_REMOTE_CODE + body, encoding="utf8")
    config = read_json(directory / "config.json")
    config["auto_map"] = {auto: f"{REMOTE_MODULE}.{name}" for auto, name in classes.items()}
    write_json(directory / "config.json", config)
