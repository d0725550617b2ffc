"""The picture in docs/architecture.md, the import contract and the modules on disk are one."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "flexrank"
DOCUMENT = ROOT / "docs" / "architecture.md"
ENTRY_POINTS = {"__init__", "__main__"}


def drawn_rows(text: str) -> dict[int, set[str]]:
    """Row number to modules: lines ` 6 │ a · b │ ...`, continued by lines without a number."""
    rows: dict[int, set[str]] = {}
    number = -1
    for line in text.splitlines():
        match = re.match(r"^ *(\d*) *│ (.+?) *│", line)
        if match:
            number = int(match[1]) if match[1] else number
            modules = match[2].split(" · ")
            assert not rows.get(number, set()) & set(modules), f"row {number} names a module twice"
            rows.setdefault(number, set()).update(modules)
    return rows


def contracts() -> list[dict[str, Any]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["tool"]["importlinter"]["contracts"]


def contract_rows(layers: list[str]) -> dict[int, set[str]]:
    return {row: {name.strip() for name in layer.split("|")} for row, layer in enumerate(reversed(layers))}


def modules_on_disk() -> set[str]:
    files = {path.stem for path in PACKAGE.glob("*.py")}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return (files | packages) - ENTRY_POINTS


def test_picture_and_contract_have_the_same_rows() -> None:
    layers = contracts()[0]
    assert (layers["type"], layers["containers"], layers["exhaustive"]) == ("layers", ["flexrank"], True)
    assert set(layers["exhaustive_ignores"]) == {"__main__"}
    assert drawn_rows(DOCUMENT.read_text(encoding="utf8")) == contract_rows(layers["layers"])


def test_picture_and_disk_have_the_same_modules() -> None:
    drawn = [module for row in drawn_rows(DOCUMENT.read_text(encoding="utf8")).values() for module in row]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == modules_on_disk()


def test_heavy_libraries_are_forbidden_to_every_module_below_transformers() -> None:
    layers, forbidden = contracts()
    assert forbidden["type"] == "forbidden"
    assert {"transformers", "matplotlib", "peft"} <= set(forbidden["forbidden_modules"])
    rows = contract_rows(layers["layers"])
    shared = next(row for row, modules in rows.items() if "hf" in modules)
    core = {name for row, modules in rows.items() if row <= shared for name in modules} - {"hf"}
    assert {name.removeprefix("flexrank.") for name in forbidden["source_modules"]} == core


def test_the_comparison_sees_a_moved_and_a_missing_module() -> None:
    text = DOCUMENT.read_text(encoding="utf8")
    rows = contract_rows(contracts()[0]["layers"])
    assert drawn_rows(text.replace("│ nn  ", "│ old ", 1)) != rows
    assert drawn_rows(text.replace("hf · allocate", "hf", 1)) != rows
    assert drawn_rows(text.replace("3 │ nn", "  │ nn", 1)) != rows


def test_modules_named_in_the_table_exist() -> None:
    table = DOCUMENT.read_text(encoding="utf8").partition("## Where a change goes")[2].partition("## Rules")[0]
    for row in table.splitlines():
        cells = row.split("|")
        for name in re.findall(r"`([a-z_/]+)`", cells[2]) if len(cells) > 2 else ():
            base = ROOT if name.startswith("research/") else PACKAGE
            assert (base / name).is_dir() or (base / f"{name}.py").is_file(), f"{name}, in: {row}"


def test_importing_flexrank_brings_no_heavy_library() -> None:
    heavy = ["transformers", "tokenizers", "matplotlib", "peft", "scipy", "sklearn", "typer", "yaml"]
    code = f"import sys, flexrank; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"
