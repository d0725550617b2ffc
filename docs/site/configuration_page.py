"""The keys of a run's configuration, read from its classes and from the comments in their source."""

import ast
import inspect
from typing import Any

from flexrank.run.config import RunConfig
from flexrank.run.data_config import Section

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
NAMES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}


def configuration_tables() -> str:
    """A Markdown table of each section's keys: values, default and meaning."""
    sections = {"": RunConfig} | {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }
    return "\n".join(_section(name, kind, set(sections)) for name, kind in sections.items())


def _section(name: str, kind: type[Section], sections: set[str]) -> str:
    schema, meanings = kind.model_json_schema(), comments_of(kind)
    lines = [f"## {name or 'The run'}\n", f"{inspect.cleandoc(kind.__doc__ or '')}\n"]
    lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, value in schema["properties"].items():
        if not name and key in sections:
            continue
        place = f"{name}.{key}" if name else key
        default = f"`{_shown(value['default'])}`" if "default" in value else "must be given"
        lines.append(f"| `{place}` | {_values(value, schema)} | {default} | {meanings.get(key, '')} |")
    return "\n".join(lines) + "\n"


def comments_of(kind: type) -> dict[str, str]:
    """The comment of each attribute of a class: the lines above it, and what follows it on its last line."""
    source = inspect.getsource(kind)
    lines, found = source.splitlines(), dict[str, str]()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above, at = list[str](), node.lineno - 2
        while lines[at].strip().startswith("#"):
            above.insert(0, lines[at].strip().lstrip("# "))
            at -= 1
        after = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
        text = " ".join([*above, *[after] * bool(after)]).replace("|", r"\|").replace("None", "`null`")
        found[node.target.id] = text[:1].upper() + text[1:]
    return found


def _values(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a key may be, in words."""
    if "anyOf" in value:
        return " or ".join(_values(one, schema) for one in value["anyOf"] if one.get("type") != "null")
    if "$ref" in value:
        return _values(schema["$defs"][value["$ref"].rpartition("/")[2]], schema)
    for key in ("enum", "const"):
        if key in value:
            return ", ".join(f"`{one}`" for one in (value[key] if key == "enum" else [value[key]]))
    if value["type"] == "array":
        return f"list of: {_values(value['items'], schema)}"
    limits = [f"{sign} {value[name]:,}" for name, sign in BOUNDS.items() if name in value]
    return " ".join([NAMES[value["type"]], *[", ".join(limits)] * bool(limits)])


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
