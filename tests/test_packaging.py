"""The wheel, built from the source distribution, holds each file of the package, and says what it needs."""

import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of the source distribution, which is built beside the tree: the tree stays as it is."""
    place = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        copy(ROOT / name, place)
    copytree(ROOT / "src", place / "src", ignore=ignore_patterns("__pycache__", "*.egg-info"))
    build("sdist", place)
    (source,) = place.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", source.name], cwd=place, check=True)
    build("wheel", unpacked := place / source.name.removesuffix(".tar.gz"))
    (built,) = unpacked.glob("*.whl")
    return zipfile.ZipFile(built)


def build(kind: str, place: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_{kind}('.')"
    subprocess.run([sys.executable, "-c", code], cwd=place, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return message_from_bytes(wheel.read(f"{information(wheel)}/METADATA"))


def information(wheel: zipfile.ZipFile) -> str:
    return next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)


def test_the_wheel_holds_what_the_tree_holds(wheel: zipfile.ZipFile) -> None:
    """Data that is read at run time too: the page of a report, the stub that `import flexrank` reads, `py.typed`."""
    tree = {
        path.relative_to(ROOT / "src").as_posix(): path.read_bytes()
        for path in (ROOT / "src" / "flexrank").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    built = {name: wheel.read(name) for name in wheel.namelist() if not name.startswith(information(wheel))}
    assert built == tree
    assert {"flexrank/__init__.pyi", "flexrank/py.typed", "flexrank/run/page/page.html"} <= tree.keys()


def test_the_wheel_carries_its_licence_and_its_command(wheel: zipfile.ZipFile) -> None:
    place = information(wheel)
    assert wheel.read(f"{place}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "flexrank = flexrank.cli:main" in wheel.read(f"{place}/entry_points.txt").decode()


def test_the_metadata_name_what_is_needed_and_each_extra_apart(metadata: Message) -> None:
    needed = {Requirement(line) for line in metadata.get_all("Requires-Dist", [])}
    wanted = {Requirement(line) for line in PROJECT["dependencies"]}
    for extra, lines in PROJECT["optional-dependencies"].items():
        wanted |= {Requirement(f"{line}; extra == '{extra}'") for line in lines}
    assert needed == wanted
    assert set(metadata.get_all("Provides-Extra", [])) == PROJECT["optional-dependencies"].keys()
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
