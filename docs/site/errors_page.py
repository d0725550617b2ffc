"""The messages of flexrank's errors, read from its source."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "flexrank"
#: What is called with a message: errors, and what ends a command with one. pydantic passes on what a check raises.
ERRORS = {"FlexrankError", "DivergedError", "ProcessLost", "ValueError", "_report_error", "_Interrupted"}
#: How functions end whose texts a caller raises.
GIVING = "conflicts"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def messages_of(modules: list[str]) -> str:
    """A Markdown list of the messages that these modules and packages of flexrank raise."""
    found = sorted({message for module in modules for message in _messages(module)})
    return "\n".join(f"- `{message}`" for message in found)


def modules() -> list[str]:
    """The modules and packages of flexrank that raise errors."""
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    return sorted(name for name in names if _messages(name))


@cache
def _messages(module: str) -> tuple[str, ...]:
    files = (PACKAGE / module).rglob("*.py") if (PACKAGE / module).is_dir() else [PACKAGE / f"{module}.py"]
    return tuple(text for file in files for text in messages_in(ast.parse(file.read_text(encoding="utf8"))))


def messages_in(tree: ast.Module) -> Iterator[str]:
    """The first argument of each error that a module makes; what depends on the input is a NAME, or `…`.

    A name in it stands for the text that its function gives it; of a call of the module's own function, which finds out
    what is wrong, all texts are listed that the function returns or yields.
    """
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    giving = {name for name in functions if name.endswith(GIVING)}
    for place in (tree, *functions.values()):
        texts = _local_texts(place)
        for call in _own_nodes(place):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ERRORS and call.args:
                yield from _texts_of(call.args[0], texts)
                calls = [node for node in ast.walk(call.args[0]) if isinstance(node, ast.Call)]
                giving |= {node.func.id for node in calls if isinstance(node.func, ast.Name)} & functions.keys()
    for name in giving:
        texts = _local_texts(functions[name])
        for node in _own_nodes(functions[name]):
            if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                yield from _texts_of(node.value, texts)


def _own_nodes(place: ast.AST) -> Iterator[ast.AST]:
    """What is inside a function, or a module, without the functions inside it."""
    for node in ast.iter_child_nodes(place):
        if not isinstance(node, Function):
            yield node
            yield from _own_nodes(node)


def _local_texts(place: ast.AST) -> dict[str, ast.expr]:
    """The names that are given a text inside a function, and the text."""
    return {
        target.id: node.value
        for node in _own_nodes(place)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr | ast.Constant | ast.IfExp)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _texts_of(value: ast.expr, texts: dict[str, ast.expr]) -> Iterator[str]:
    for text in _shown(value, texts):
        if any(map(str.islower, text)):  # else all of it is another's words
            yield " ".join(text.replace("……", "…").split()).replace("`", "'")


def _shown(value: ast.expr, texts: dict[str, ast.expr]) -> list[str]:
    """The forms that a text may have: two for each choice in it."""
    if isinstance(value, ast.Constant):
        return [str(value.value)] if isinstance(value.value, str) else ["…"]
    if isinstance(value, ast.IfExp):
        return _shown(value.body, texts) + _shown(value.orelse, texts)
    if isinstance(value, ast.Name) and value.id in texts:
        return _shown(texts[value.id], {name: text for name, text in texts.items() if name != value.id})
    if isinstance(value, ast.FormattedValue):
        return _shown(value.value, texts)
    if isinstance(value, ast.JoinedStr):
        forms = [""]
        for part in value.values:
            forms = [before + after for before in forms for after in _shown(part, texts)]
        return forms
    if isinstance(value, ast.Name | ast.Attribute):
        return [(value.id if isinstance(value, ast.Name) else value.attr).upper().strip("_")]
    return ["…"]
