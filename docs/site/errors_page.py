"""The messages of flexrank's errors, read from its source."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "flexrank"
ERRORS = {"FlexrankError"}


def messages_of(rooms: list[str]) -> str:
    """A Markdown list of the messages that these modules and packages of flexrank raise."""
    found = sorted({message for room in rooms for message in _messages(room)})
    return "\n".join(f"- `{message}`" for message in found)


def rooms() -> list[str]:
    """The modules and packages of flexrank that raise errors."""
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    return sorted(name for name in names if _messages(name))


@cache
def _messages(room: str) -> tuple[str, ...]:
    files = (PACKAGE / room).rglob("*.py") if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]
    return tuple(text for file in files for text in _raised(ast.parse(file.read_text(encoding="utf8"))))


def _raised(tree: ast.Module) -> Iterator[str]:
    """The first argument of each error that is made; what depends on the input is shown as `…`."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ERRORS and call.args:
            text = _shown(call.args[0])
            if any(map(str.isalpha, text)):
                yield text


def _shown(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return " ".join(str(value.value).split())
    if isinstance(value, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in value.values)
        return "".join(map(str, parts)).replace("`", "'")
    return "…"
