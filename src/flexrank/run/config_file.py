"""A configuration's YAML file."""

from pathlib import Path
from typing import Any

import yaml

from flexrank.errors import FlexrankError, short_repr


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice; YAML's own loader keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                line = node.value[number][0].start_mark.line + 1
                raise FlexrankError(f"{self.name}: line {line} has the key {key!r} a second time; join the two")
        return super().construct_mapping(node, deep)


def read_config_file(file: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file; raises FlexrankError if it is not YAML, no mapping, or has a key twice."""
    try:
        with file.open(encoding="utf8") as stream:
            value = yaml.load(stream, _Loader)
    except FlexrankError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a day that no month has, or too deep a nesting
        raise FlexrankError(f"{file}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(value, dict):
        raise FlexrankError(
            f"{file}: holds {short_repr(value)}; a config is a mapping of keys such as name, task, model"
        )
    return value
