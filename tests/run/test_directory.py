"""What runs again, what an interruption or a wrong input leaves, and who may write to a run."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from flexrank import probe as sensitivity
from flexrank.distill.step import Step
from flexrank.errors import FlexrankError
from flexrank.files import digest_files
from flexrank.run import directory, run_stages, runner
from flexrank.run.config import load_config, parse_config
from flexrank.run.directory import RunDirectory, identity, model_identity
from flexrank.run.runner import fingerprints
from tiny_runs import TEXT, rerun, settings

pytestmark = pytest.mark.usefixtures("verified_here")

#: A checkpoint of another configuration.
OTHER = "distill-0123456789abcdef"
BELOW_DISTILL = ("slack", "evaluate_initial", "evaluate", "deploy", "report")


def test_a_second_run_does_nothing_and_touches_nothing(copied: Path) -> None:
    def times() -> dict[Path, int]:
        files = (path for path in copied.rglob("*") if path.is_file() and path.name != "run.lock")
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    assert rerun(copied) == () and times() == before


class Stop:
    """Counts calls of a function, and at one of them acts as Ctrl-C does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, at: int | None):
        self.calls, original = 0, getattr(where, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise KeyboardInterrupt
            return original(*arguments, **options)

        monkeypatch.setattr(where, name, counted)


@pytest.mark.parametrize(
    ("stage", "where", "name", "at", "left", "result"),
    [
        # 15 layers of 4 ranks, of which the full one is not evaluated: the 22nd call is in the eighth layer, and seven
        # are kept.
        # The first call of the resumed one sees that the checkpoint is of the same probe.
        ("probe", sensitivity, "_probe", 22, 1 + 3 * 8, "sensitivity.json"),
        # 6 steps, a checkpoint every 2: stopped in the fifth, four are kept.
        ("distill", Step, "_backward", 5, 2, "elastic/elastic.safetensors"),
    ],
)
def test_an_interrupted_stage_goes_on_to_the_same_bits(
    stage: str, where: Any, name: str, at: int, left: int, result: str,
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = load_config(finished).model_copy(update={"output": str(tmp_path / "run")})
    with monkeypatch.context() as patch:
        Stop(patch, where, name, at)
        with pytest.raises(KeyboardInterrupt):
            run_stages(config, stage)
    partial = tmp_path / "run" / "partial"
    (kept,) = partial.iterdir()
    leave_stale_files(partial, f".{kept.name}.0.aside")
    with monkeypatch.context() as patch:
        resumed = Stop(patch, where, name, None)
        assert stage in run_stages(config, stage).executed
    assert resumed.calls == left
    assert (tmp_path / "run" / result).read_bytes() == (finished / result).read_bytes()
    assert left_in(partial) == ({OTHER} if stage == "probe" else set())  # of a stage that this command does not reach


def left_in(partial: Path) -> set[str]:
    return {path.name for path in partial.iterdir()} if partial.exists() else set()


def leave_stale_files(partial: Path, *names: str) -> None:
    """What killed processes leave: scratch of an evaluation, and checkpoints of other configurations."""
    (partial / "evaluate-x1y2z3").mkdir(parents=True)
    (partial / "evaluate-x1y2z3" / "model.safetensors").write_text("")
    (partial / OTHER).mkdir()
    for name in ("probe-0123456789abcdef.json", *names):
        (partial / name).write_text("")


def test_a_run_leaves_nothing_stale_in_partial(copied: Path) -> None:
    """A checkpoint that an unfinished stage resumes from stays, and so do others of stages that are not reached."""
    config, partial = load_config(copied), copied / "partial"
    leave_stale_files(partial)
    assert rerun(copied) == ()
    assert not partial.exists()
    kept = partial / f"distill-{fingerprints(config, config.model)['distill'][:16]}"
    shutil.rmtree(copied / "elastic")
    (copied / "stages" / "distill.json").unlink()
    leave_stale_files(partial)
    kept.mkdir()
    with pytest.raises(FlexrankError, match="too small"):  # refused before it is probed, and no checkpoint is lost
        rerun(copied, "data.probe=8", "allocation.budgets=[0.001]")
    assert rerun(copied, until="probe") == ()
    assert left_in(partial) == {kept.name, OTHER}


def test_a_run_is_not_inside_what_it_reads(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own cards, logs and weights would be texts or a part of the model, and change all fingerprints."""
    (tmp_path / "texts").mkdir()
    shutil.copy(sources / "text.txt", tmp_path / "texts" / "a.txt")
    shutil.copytree(sources / "language", tmp_path / "model")
    monkeypatch.chdir(tmp_path / "texts")
    for model, data, output, key in (
        (tmp_path / "model", ".", "runs", "data.path '.'"), (tmp_path / "model", ".", "../model/runs", "model '"),
    ):  # fmt: skip
        config = parse_config(settings(model, Path(data), Path(output)))
        with pytest.raises(FlexrankError, match=f"^output '{re.escape(output)}' is inside {re.escape(key)}"):
            run_stages(config, "decompose")
        assert not Path(output).exists()
    config = parse_config(settings(tmp_path / "model", Path(), Path("../runs")))
    assert run_stages(config, "decompose").executed == ("decompose",)


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("deployment.budgets=[0.8]", ("deploy", "report")),
        ("evaluation.latency=false", ("evaluate", "report")),
        ("distillation.steps=4", ("distill", "slack", "evaluate", "deploy", "report")),
        ("distillation.steps=0", ("distill", *BELOW_DISTILL)),
        ("allocation.budgets=[0.6]", ("allocate", "distill", *BELOW_DISTILL)),
        ("data.probe=8", ("probe", "allocate", "distill", *BELOW_DISTILL)),
        ("deployment.slack=0", ("probe", "allocate", "distill", *BELOW_DISTILL)),  # none is counted for it
        ("deployment.slack=3", ("slack", "evaluate", "deploy", "report")),
        ("device=auto", ("evaluate", "report")),
    ],
)
def test_a_changed_key_runs_its_stage_and_those_below(override: str, again: Any, copied: Path, caplog: Any) -> None:
    assert rerun(copied, override) == again
    assert ("size 0.5 has 0.510 of the dense parameters" in caplog.text) == (override == "deployment.slack=3")
    assert rerun(copied) == ()


@pytest.mark.parametrize("until", ["slack", "evaluate", "deploy"])
def test_what_reads_a_trained_model_does_not_train_it_again(
    until: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in (copied / "elastic").iterdir()}
    with pytest.raises(FlexrankError, match=r"elastic: would be trained again \(distillation.steps is 4 and was 6\)"):
        rerun(copied, "distillation.steps=4", "deployment.slack=3", until=until)
    with pytest.raises(FlexrankError, match=r"again .allocation.budgets is \(0.6,\) and was \(0.8, 0.5\)."):
        rerun(copied, "allocation.budgets=[0.6]", until=until)
    with pytest.raises(FlexrankError, match="again .deployment.slack is 0 and was 'auto'.; set that back, train again"):
        rerun(copied, "deployment.slack=0", until=until)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "model_identity", lambda _: "other")
        moved = "or the files of model .* or of its data, which are looked for from the current directory, are not"
        with pytest.raises(FlexrankError, match=f"{moved}.*or use it as it is by `flexrank deploy {copied}/elastic`"):
            run_stages(load_config(copied), until)
    assert {path: path.read_bytes() for path in (copied / "elastic").iterdir()} == before
    assert rerun(copied) == ()  # by the configuration of before
    assert "slack" in rerun(copied, "deployment.slack=3", until=until)  # which training does not read


@pytest.mark.parametrize("until", ["slack", "evaluate", "deploy"])
def test_a_model_that_other_code_has_trained_is_used_as_it_is(
    until: str, copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, digest, changed = digest_files(copied / "elastic"), directory._digest_of, {"run/training"}
    monkeypatch.setattr(directory, "_digest_of", lambda room: digest(room) + "changed" * (room in changed))
    assert run_stages(load_config(copied), until).executed == ()
    assert f"{copied}/elastic was trained by other code of flexrank, and is used as it is" in caplog.text
    with pytest.raises(FlexrankError, match="distillation.steps is 4 and was 6"):
        rerun(copied, "distillation.steps=4", until=until)
    (kept := copied / "partial" / f"distill-{fingerprints(load_config(copied), 'model')['distill'][:16]}").mkdir(
        parents=True
    )
    assert "deploy" in rerun(copied, "deployment.budgets=[0.8]", until="deploy")
    changed.add("run/stages")  # of which every stage has some
    shutil.rmtree(copied / "elastic_initial")
    assert rerun(copied, until=until)[:2] == ("decompose", "slack") and rerun(copied, until=until) == ()
    assert kept.is_dir() and digest_files(copied / "elastic") == before
    for record in (copied / "stages").iterdir():  # as earlier versions have written them
        record.write_text(
            json.dumps({key: one for key, one in json.loads(record.read_text()).items() if key != "code"})
        )
    with pytest.raises(FlexrankError, match="trained again .its config.yaml, flexrank's own code, or the files"):
        run_stages(load_config(copied), until)


def test_a_trained_model_that_is_gone_is_trained_again(copied: Path) -> None:
    shutil.rmtree(copied / "elastic")
    assert rerun(copied, "distillation.steps=4", until="slack") == ("distill", "slack")


def test_changed_code_runs_its_stages_and_those_below(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = directory._digest_of
    config, source = load_config(copied), "model"
    before = fingerprints(config, source)
    for room, first in {"run/samples": "decompose", "run/stages": "decompose", "run/candidates": "probe",
                        "artefacts": "decompose", "run/training": "distill", "run/sizes": "slack"}.items():  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(directory, "_digest_of", lambda one, room=room: digest(one) + "changed" * (one == room))
            after = fingerprints(config, source)
        assert next(stage for stage in before if before[stage] != after[stage]) == first, room
    monkeypatch.setattr(directory, "_digest_of", lambda room: digest(room) + "changed" * (room == "deployment"))
    outcome = run_stages(load_config(copied))
    assert outcome.executed == ("slack", "evaluate", "deploy", "report")


def test_comments_and_docstrings_are_no_code() -> None:
    plain = "def f(x):\n    return x\n"
    assert directory._dump(plain + "# why\n") == directory._dump("\n" + plain)
    with_words = 'def f(x):\n    """What."""\n    return x\n'
    assert directory._dump(with_words) == directory._dump(with_words.replace("What", "Why")) == directory._dump(plain)
    assert directory._dump(plain) != directory._dump(plain.replace("return x", "return -x"))


def test_changed_texts_run_everything_again(copied: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT)
    assert rerun(copied, f"data.path={other}", until="decompose") == ("decompose",)
    other.write_text(TEXT.replace("fox", "cat"))
    assert rerun(copied, until="decompose") == ("decompose",)
    assert rerun(copied, until="decompose") == ()


def test_of_a_folder_of_texts_only_what_is_read_counts(copied: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "texts").mkdir()
    (folder / "a.txt").write_text(TEXT)
    (apart := folder / "apart").mkdir()
    (apart / "a.txt").write_text(TEXT)
    again = [f"data.path={folder}", f"data.held_out={apart}"]
    assert rerun(copied, *again, until="decompose") == ("decompose",)
    for place in (folder, apart):
        (place / ".DS_Store").write_text("x")
        (place / "picture.png").write_text("x")
        assert rerun(copied, *again, until="decompose") == ()
        (place / "b.md").write_text(TEXT)
        assert rerun(copied, *again, until="decompose") == ("decompose",)


def test_a_models_card_and_hidden_files_are_none_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = model_identity(tmp_path)
    assert list(first) == ["config.json"]
    for name in ("README.md", ".DS_Store", ".cache/huggingface/x.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert model_identity(tmp_path) == first
    (tmp_path / "config.json").write_text("{ }")
    assert model_identity(tmp_path) != first != model_identity(tmp_path / "none")
    assert model_identity("you/model") == "you/model"
    assert {"README.md", ".DS_Store"} < identity(tmp_path).keys()


def test_a_missing_result_is_made_again_and_an_edited_one_refused(copied: Path) -> None:
    (copied / "chain.json").unlink()
    assert rerun(copied, until="allocate") == ("allocate",)
    text = (copied / "chain.json").read_text()
    (copied / "chain.json").write_text(text.replace('"joint"', '"jOint"'))
    with pytest.raises(FlexrankError, match="chain.json: was edited after `allocate` wrote it"):
        rerun(copied)


def test_what_reads_times_is_done_again_with_them(copied: Path) -> None:
    (copied / "evaluation.json").unlink()
    assert rerun(copied, until="evaluate") == ("evaluate",)
    assert rerun(copied) == ("report",)
    assert rerun(copied) == ()


def test_a_directory_that_lost_a_file_is_made_again_and_a_truncated_one_refused(copied: Path) -> None:
    (copied / "deployed" / "0.50" / "model.safetensors").unlink()
    (copied / "figures" / "ranks.png").unlink()
    assert rerun(copied) == ("deploy", "report")
    assert rerun(copied) == ()
    state = copied / "elastic_initial" / "elastic.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(FlexrankError, match="was edited after `decompose` wrote it; delete .*/elastic_initial to make"):
        rerun(copied)
    shutil.rmtree(copied / "elastic_initial")
    assert rerun(copied) == ("decompose",)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.path=./nowhere.txt", "nowhere.txt"),
        ("distillation.learning_rate=1e30", "at step"),
        ("model=./nowhere", "nowhere"),
        ("deployment.budgets=[0.8, 0.001]", "too small"),
        ("dtype=float16", "dtype 'float16' cannot be consolidated; take bfloat16"),
    ],
)
def test_a_wrong_input_leaves_a_finished_run_as_it_was(override: str, part: str, copied: Path) -> None:
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and "partial" not in path.parts}
    with pytest.raises(FlexrankError, match=part):
        rerun(copied, override)
    assert not [path for path in copied.rglob("*") if path.name.endswith((".was", ".aside", ".old"))]
    after = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and "partial" not in path.parts}
    assert after == before
    assert rerun(copied) == ()


def test_a_configuration_that_cannot_be_read_is_not_written_over(copied: Path) -> None:
    config = load_config(copied)
    (copied / "config.yaml").write_text("name: tiny\nkey_of_the_future: 1\n")
    with pytest.raises(FlexrankError, match="unknown key 'key_of_the_future'.*; correct it, remove the run"):
        run_stages(config)
    assert (copied / "config.yaml").read_text() == "name: tiny\nkey_of_the_future: 1\n"


def test_one_process_at_a_time_writes_to_a_run(copied: Path) -> None:
    with RunDirectory(copied).locked(), pytest.raises(FlexrankError, match=f"process {os.getpid()} writes to this run"):
        rerun(copied)


def test_a_killed_process_leaves_no_lock_and_nothing_half_written(copied: Path) -> None:
    (copied / "run.lock").write_text("999999")
    (old := copied / ".elastic.1xabcdef.old").mkdir()
    (copied / "elastic").rename(old / "elastic")
    (copied / "stages" / ".slack.json.2xabcdef.aside").touch()
    assert rerun(copied) == ()
    assert not [path for path in copied.rglob("*") if path.name.endswith((".aside", ".old"))]


def test_a_killed_process_leaves_nothing_put_away(copied: Path) -> None:
    config = (copied / "config.yaml").read_bytes()
    (copied / "stages" / "slack.json.was").write_text("{}")
    (copied / "config.yaml").rename(copied / "config.yaml.was")
    with RunDirectory(copied).locked():
        assert (copied / "config.yaml").read_bytes() == config and not list(copied.rglob("*.was"))
    (copied / "config.yaml.was").write_text("name: another")
    assert rerun(copied) == () and not list(copied.rglob("*.was"))
    assert (copied / "config.yaml").read_bytes() == config


def test_a_run_of_another_name_is_not_written_over(copied: Path) -> None:
    with pytest.raises(FlexrankError, match="holds the run 'tiny', not 'other'"):
        rerun(copied, "name=other")
