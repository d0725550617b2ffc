"""Files are whole or absent, whatever happens while they are written."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from flexrank import files
from flexrank.errors import FlexrankError
from flexrank.files import (
    LEFTOVER,
    atomic_file,
    clear_leftovers,
    digest_json,
    directory_aside,
    directory_bytes,
    read_json,
    remove_artefact,
    require_keys,
    write_document,
    write_json,
)


def test_json_keeps_every_bit(tmp_path: Path) -> None:
    value = {"a": 0.1 + 0.2, "b": [1e-323, -0.0], "ü": None}
    write_json(tmp_path / "deep" / "x.json", value)
    assert repr(read_json(tmp_path / "deep" / "x.json")) == repr(value)
    assert os.listdir(tmp_path / "deep") == ["x.json"]


@pytest.mark.parametrize(
    "text", [b"{", b"\xff\xfe", b'{"a": NaN}', b"[1, Infinity]", b"", b"[1e999]", b"1" * 5000, b"[" * 10**5]
)
def test_what_is_not_json_is_named(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(FlexrankError, match="x.json: ") as error:
        read_json(path)
    assert "\n" not in str(error.value)
    with pytest.raises(FlexrankError, match="no such file"):
        read_json(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert path.read_bytes() == text


def test_a_file_is_replaced_on_success_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half"), atomic_file(path) as aside:
        aside.write_text("half")
        raise RuntimeError("half")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    with atomic_file(path) as aside:
        aside.write_text("new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_a_directory_is_replaced_on_success_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with directory_aside(path, "marker") as aside:
        (aside / "marker").write_text("1234")
    with pytest.raises(RuntimeError, match="half"), directory_aside(path, "marker") as aside:
        (aside / "half").write_text("1")
        raise RuntimeError("half")
    assert os.listdir(path) == ["marker"] and os.listdir(tmp_path) == ["folder"] and directory_bytes(path) == 4
    with directory_aside(path, "marker") as aside:
        (aside / "new").write_text("1")
    assert os.listdir(path) == ["new"] and os.listdir(tmp_path) == ["folder"]


def test_a_place_that_takes_no_directory_is_named_as_it_was_given() -> None:
    with pytest.raises(OSError, match="'/proc/small'$"):
        directory_aside("/proc/small", "marker").__enter__()


def test_nobody_elses_directory_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with directory_aside(path, "marker") as aside:  # an empty one may be
        (aside / "thesis.tex").write_text("five years")
    with pytest.raises(FlexrankError, match="holds other files, and no marker to replace; remove it"):
        directory_aside(path, "marker").__enter__()
    with pytest.raises(FlexrankError, match="is a file; choose another name"):
        directory_aside(path / "thesis.tex", "marker").__enter__()
    assert (path / "thesis.tex").read_text() == "five years" and os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()])
def test_a_directory_is_put_back_where_the_renaming_fails(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    with directory_aside(path, "old") as aside:
        (aside / "old").write_text("1")
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if str(source).endswith(".aside"):
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(type(error)), directory_aside(path, "old") as aside:
        (aside / "new").write_text("1")
    assert os.listdir(path) == ["old"] and os.listdir(tmp_path) == ["folder"]


def test_missing_keys_are_named() -> None:
    with pytest.raises(FlexrankError, match="chain: key 'b' is missing; it needs a, b"):
        require_keys({"a": 1}, ("a", "b"), "chain")


def test_the_digest_of_json_is_that_of_its_text_with_sorted_keys() -> None:
    wanted = hashlib.sha256(b'{"a": [1, 0.5, null], "b": "\\u00fc"}').hexdigest()
    assert digest_json({"b": "ü", "a": (1, 0.5, None)}) == wanted
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest_json(float("nan"))


def test_others_may_read_a_directory_as_the_umask_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors writes files that only their owner reads; the umask is not touched, for it is of all threads."""
    before = os.umask(0o022)
    try:
        monkeypatch.setattr(os, "umask", lambda _: pytest.fail("changes it for all threads"))
        with directory_aside(tmp_path / "new", "x") as aside:
            (aside / "deep").mkdir()
            (aside / "x").touch(0o600)
            (aside / "deep" / "y").touch(0o600)
    finally:
        monkeypatch.undo()
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").rglob("*")}
    assert modes == {"x": 0o644, "deep": 0o755, "y": 0o644}


def test_what_a_killed_process_leaves_is_removed_and_what_it_put_away_comes_back(tmp_path: Path) -> None:
    """As after a kill between the two renames of a directory; then as after one that followed them."""
    for _ in range(2):
        old, aside = tmp_path / ".folder.abcdefg1.old", tmp_path / ".folder.abcdefg2.aside"
        (old / "folder").mkdir(parents=True)
        (old / "folder" / "state").write_text("good" if not (tmp_path / "folder").exists() else "older")
        aside.mkdir()
        (aside / "state").write_text("half")
        (tmp_path / ".file.json.abcdefg3.aside").write_text("half")
        clear_leftovers(tmp_path)
        assert os.listdir(tmp_path) == ["folder"] and (tmp_path / "folder" / "state").read_text() == "good"


def test_hidden_files_of_others_are_no_leftovers(tmp_path: Path) -> None:
    (tmp_path / ".config.yaml.old").write_text("an editor's")
    (tmp_path / ".mine.old").mkdir()
    (tmp_path / ".notes.aside").write_text("a user's")
    clear_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".config.yaml.old", ".mine.old", ".notes.aside"]


def test_leftovers_are_known_by_the_names_they_are_given(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "file.json") as file, directory_aside(tmp_path / "folder", "x") as folder:
        names = [file.name, folder.name]
        assert all(LEFTOVER.fullmatch(name) for name in names)
        assert [LEFTOVER.fullmatch(name)["of"] for name in names] == ["file.json", "folder"]


def test_what_a_living_process_writes_is_no_leftover(tmp_path: Path) -> None:
    """Such as a size that `flexrank deploy` exports beside a run's artefact while another command opens the run."""
    with directory_aside(tmp_path / "folder", "x") as aside:
        (aside / "x").write_text("half")
        clear_leftovers(tmp_path)
        assert (aside / "x").read_text() == "half"
    assert os.listdir(tmp_path) == ["folder"]


def test_what_a_living_process_replaces_is_not_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command opens the place between the two renames, and while the old artefact is removed."""
    artefact(tmp_path / "folder", "old")
    replace = os.replace

    def replaced(source: Path, target: Path) -> None:
        clear_leftovers(tmp_path)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    artefact(tmp_path / "folder", "new")
    assert os.listdir(tmp_path) == ["folder"] and (tmp_path / "folder" / "new").is_file()


def test_a_directory_that_was_renamed_meanwhile_is_not_this_commands(tmp_path: Path) -> None:
    assert files._is_held(tmp_path / ".folder.abcdefg2.aside")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr("fcntl.flock", refused)
    artefact(tmp_path / "folder", "x")
    (tmp_path / ".folder.abcdefg2.aside").mkdir()
    clear_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["folder"]


def artefact(path: Path, *names: str) -> None:
    """A directory of these files, named by a document, and a card."""
    with directory_aside(path, "doc.json") as aside:
        for name in names:
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_text(name)
        write_document(
            aside / "doc.json", "test", {"files": {names[0]: ""}, "shards": {name: [] for name in names[1:]}}
        )
        (aside / "README.md").write_text("card")


def entries(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["renamed", "filled", "interrupted"])
def test_what_an_artefact_did_not_write_stays(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small"
    artefact(path, "config.json", "one", "deep/two")
    mine = {".git/HEAD", "adapter/weights", "notes.txt"}
    for name in mine:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    if place == "filled":
        monkeypatch.chdir(path)
    if place == "interrupted":  # after the renaming
        monkeypatch.setattr("flexrank.files._keep_others", interrupted)
        with pytest.raises(KeyboardInterrupt):
            artefact(path, "config.json", "three")
        monkeypatch.undo()
        clear_leftovers(tmp_path)
    else:
        artefact(path, "config.json", "three")
    assert entries(path) == {*mine, "doc.json", "README.md", "config.json", "three"}
    assert os.listdir(tmp_path) == ["small"] and all((path / name).read_text() == name for name in mine)
    remove_artefact(path)
    assert entries(path) == mine
    artefact(tmp_path / "other", "one")
    remove_artefact(tmp_path / "other")
    assert os.listdir(tmp_path) == ["small"]


@pytest.mark.parametrize("name", ["../precious", "deep/../../precious", "ABSOLUTE", "."])
def test_what_a_document_names_outside_its_directory_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is removed by this test itself, whatever the code asks for: the absolute name begins with the root."""
    precious, path = tmp_path / "precious", tmp_path / "small"
    monkeypatch.setattr("flexrank.files.shutil.rmtree", lambda place: pytest.fail(f"would remove {place}"))
    precious.write_text("mine")
    path.mkdir()
    (path / "one").touch()
    write_document(path / "doc.json", "test", {"files": {name.replace("ABSOLUTE", str(precious)): ""}})
    remove_artefact(path)
    assert precious.read_text() == "mine" and entries(path) == {"one"}


def test_a_private_directory_stays_private(tmp_path: Path) -> None:
    artefact(tmp_path / "small", "one")
    (tmp_path / "small").chmod(0o700)
    artefact(tmp_path / "small", "two")
    assert (tmp_path / "small").stat().st_mode & 0o777 == 0o700


def test_a_link_is_followed_and_a_mount_point_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "link").symlink_to(disk)
    artefact(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink() and entries(disk) == {"doc.json", "README.md", "one"}
    before = disk.stat().st_ino
    monkeypatch.setattr(Path, "is_mount", lambda self: self == disk)
    moved, replace = list[str](), os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (moved.append(new.name), replace(old, new)))
    artefact(disk, "deep/two", "zero.txt")
    assert moved[-1] == "doc.json" and len(moved) == 5  # the first of which wrote the document
    artefact(disk, "deep/two")
    assert disk.stat().st_ino == before and entries(disk) == {"doc.json", "README.md", "deep/two"}
    with pytest.raises(RuntimeError), directory_aside(disk, "doc.json"):
        raise RuntimeError
    assert entries(disk) == {"doc.json", "README.md", "deep/two"}


def test_a_damaged_document_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "small"
    artefact(path, "one")
    (path / "doc.json").write_text((path / "doc.json").read_text()[:40])
    artefact(path, "two")
    assert entries(path) == {"doc.json", "README.md", "one", "two"}
