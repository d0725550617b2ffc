"""Processes that torchrun starts compute what one does."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flexrank as fr
import shared_work
from flexrank import processes
from flexrank.errors import FlexrankError
from flexrank.files import digest_files
from flexrank.run import run_stages
from flexrank.run.config import load_config
from flexrank.run.runner import STAGES
from launched import config_of, ended, flexrank, started
from research.kills import Run, differences
from tiny_runs import invoke


def is_near(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> bool:
    return float((found - wanted).double().norm()) <= bound * float(wanted.double().norm())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A place, and what one process computes; of an interrupted training its checkpoint is in the place."""
    place = tmp_path_factory.mktemp("shared")
    assert len(shared_work.trained(place / "of-1", shared_work.STOP)) == shared_work.STOP
    return place, shared_work.all_work(place)


@pytest.mark.slow
def test_several_processes_compute_what_one_does(alone: Any) -> None:
    """They resume what one has begun, and one resumes what they have."""
    (place, wanted), count = alone, 4
    with started(count, "tests/shared_work.py", place) as run:
        _, errors = ended(run)
    assert run.returncode == 0, errors
    found = [load_file(place / f"{count}-{number}.safetensors") for number in range(count)]
    for number, tensors in enumerate(found):
        assert tensors.keys() == wanted.keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, found[0][key]), f"{key} in process {number}"
    for key, tensor in wanted.items():
        bound = 0 if key.startswith("probed") else 1e-4 if key.startswith(("consolidated", "sharded")) else 1e-5
        assert is_near(found[0][key], tensor, bound), key

    facts = [json.loads((place / f"{count}-{number}.json").read_text()) for number in range(count)]
    unbroken, streams = shared_work.trained(None), shared_work.streamed(place)
    assert len(streams) > 30 and all(map(any, streams))
    assert [own["writes"] for own in facts] == [True] + [False] * (count - 1)
    for own in facts:
        assert own["sum"] == (total := torch.tensor(255.0 + count).bfloat16().item())
        assert own["large"] == count * (2**40 + 1)
        gathered = [256.0] * 3 + [1.0] * (3 * count - 4)
        summed = [total] * (2 if own is facts[-1] else 3)
        assert own["parts"] == [[3 * count - 1, gathered], [len(summed), summed]]
        assert own["stopped"] == [pytest.approx(unbroken[: shared_work.STOP], rel=1e-4)] * 2
        assert own["resumed"] == [pytest.approx(unbroken, rel=1e-4)] * len(shared_work.RESUMED)
        assert "objective Plain has no `terms`" in own["refused"][0]
        assert all(
            "processes got other batches; flexrank shares them out itself" in own["refused"][n] for n in (1, 4, 5)
        )
        assert all("rows reach other layers in other processes" in own["refused"][number] for number in (2, 3))
        assert all(f"processes got {2 + (own is facts[0])} batches here" in own["refused"][number] for number in (6, 7))
        assert "for the first layer, and" in own["refused"][8] and "same batches in all of them" in own["refused"][8]
        assert [one.split(",")[0] for one in own["refused"][9:]] == [
            f"{name} takes a whole model" for name in ("probe_sensitivity", "refit_")
        ]
        assert own["merged"] == {str(n): [n] if n < count else None for n in range(2 * count)}
        assert own["first"] == [1, 0, facts[0]["pid"]] and own["again"] == ["second", own["merged"]]
        assert own["restored"]
        assert own["streamed"] == streams
        assert (own["any"], own["same"]) == ([True, False], [True, False])
        assert own["whole"] == facts[0]["whole"]  # rounded by chance, and alike
    loaded, chain = fr.load_elastic(place / f"one-size-bert-{count}")
    assert {name: len(layer.u) for name, layer in fr.nested_layers(loaded).items()} == chain.entries[-1].profile
    assert len(chain.entries) == 1
    # One process goes on from where several have stopped.
    for name in (f"of-{count}", f"sharded-{count}"):
        assert shared_work.trained(place / name) == pytest.approx(unbroken, rel=1e-4)


@pytest.mark.slow
def test_two_processes_make_the_curvature_of_one(prepared: dict[str, Any], tmp_path: Path) -> None:
    values = prepared | {"probe": {"method": "curvature", "levels": 4}}
    run_stages(load_config(config_of(values, tmp_path / "one")), "probe")
    _, words = flexrank(2, "probe", config_of(values, tmp_path / "two"))
    assert words == []
    wanted, found = (json.loads((tmp_path / name / "sensitivity.json").read_text()) for name in ("one", "two"))
    for name, errors in wanted["errors"].items():
        assert found["errors"][name] == pytest.approx(errors, rel=1e-5), name


@pytest.fixture(scope="module")
def of_two(prepared: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that two processes do."""
    two = tmp_path_factory.mktemp("two") / "two"
    output, words = flexrank(2, "run", config_of(prepared, two), "--json")
    assert words == []
    result = json.loads(output.splitlines()[-1])  # one object, not two
    assert len(result["executed"]) == 9
    return two


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(prepared: dict[str, Any], of_two: Path) -> None:
    one, two = Path(prepared["output"]), of_two

    def read(name: str) -> list[Any]:
        return [json.loads((place / name).read_text()) for place in (one, two)]

    for name in ("chain.json", "sensitivity.json"):
        wanted, found = read(name)
        assert found == wanted, name
    wanted, found = read("history.json")
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-4) and found["budgets"] == wanted["budgets"]
    for name in ("elastic_initial", "elastic"):
        tensors, others = (load_file(place / name / "elastic.safetensors") for place in (one, two))
        assert tensors.keys() == others.keys()
        assert all(is_near(others[key], tensor, 1e-5) for key, tensor in tensors.items()), name
    wanted, found = read("summary.json")
    for name in ("quality", "quality_before"):
        for row, other in zip(wanted["rows"], found["rows"], strict=True):
            assert other[name] == pytest.approx(row[name], rel=1e-5) and other["budget"] == row["budget"]
    assert found["base"] == wanted["base"]


@pytest.mark.slow
def test_two_processes_that_hold_parts_consolidate_as_one_does(prepared: dict[str, Any], tmp_path: Path) -> None:
    """The artefact and its checksums are read by one process."""
    one, two = Path(prepared["output"]), shutil.copytree(prepared["output"], tmp_path / "two")
    shutil.rmtree(two / "elastic")
    config = config_of(prepared, two, sharded=True, gradient_checkpointing=True)
    assert flexrank(2, "distill", config)[1] == []
    wanted, found = (json.loads((place / "history.json").read_text()) for place in (one, two))
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-4)
    tensors, others = (load_file(place / "elastic" / "elastic.safetensors") for place in (one, two))
    assert tensors.keys() == others.keys()
    assert all(is_near(others[key], tensor, 1e-4) for key, tensor in tensors.items())
    wanted, found = (json.loads((place / "elastic" / "elastic.json").read_text()) for place in (one, two))
    assert found["parameters"] == wanted["parameters"] and found["chain"] == wanted["chain"]


@pytest.mark.slow
def test_killed_processes_leave_a_run_that_ends_with_the_same_bytes(
    prepared: dict[str, Any], of_two: Path, tmp_path: Path
) -> None:
    """`python -m research.kills` does it 30 times, over all stages."""
    shutil.copytree(of_two, tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "elastic")
    (tmp_path / "killed" / "summary.json").unlink()
    run = Run(config_of(prepared, tmp_path / "killed"), tmp_path / "killed", 2)
    fell = run.kill("distill", 0.4, 0)
    assert "error: process 0 does not answer" in run.log_path.read_text()
    run.finish()
    assert fell == "distill" and differences(of_two, run.output) == set()
    (run.output / "elastic" / "elastic.json").write_text("{}")
    (run.output / "stages" / ".slack.json.1xabcdef.aside").touch()
    assert differences(of_two, run.output) == {"elastic/elastic.json", "stages/.slack.json.1xabcdef.aside"}


def test_the_run_to_kill_has_no_times_in_it_and_all_stages() -> None:
    config = load_config("research/kills.yaml")
    assert not config.evaluation.latency and config.deployment.budgets and config.distillation.steps


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    (place := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("to mount a small disk needs root")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def distilled(count: int, config: Path) -> list[str]:
    """The error and the exit statuses of so many processes; one is this process."""
    if count > 1:
        return flexrank(count, "distill", config)[1]
    result = invoke("distill", config)
    words = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return [*words, *([f"exit {result.exit_code}"] if result.exit_code else [])]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_full_disk_in_a_save_leaves_the_checkpoint_before(
    count: int, prepared: dict[str, Any], small_disk: Path
) -> None:
    """There is room for one checkpoint, and not for two; one saves a whole model, two save parts, and one goes on."""
    run = Path(shutil.copytree(prepared["output"], small_disk / "run"))
    keys = {"steps": 8, "checkpoint_every": 2, "sharded": count > 1, "gradient_checkpointing": count > 1}
    config, before = config_of(prepared, run, **keys), digest_files(run / "elastic")
    room = 4 * (run / "elastic" / "elastic.safetensors").stat().st_size  # a checkpoint takes about three times that
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - room))
    word, *statuses = distilled(count, config)
    assert word.startswith("error: ") and "No space left on device" in word
    assert statuses == ["exit 2"] * count
    (state,) = (run / "partial").iterdir()
    losses = json.loads((state / "state.json").read_text())["losses"]
    assert len(losses) == 2 and digest_files(run / "elastic") == before
    (small_disk / "filler").unlink()
    assert distilled(1, config) == []
    history = json.loads((run / "history.json").read_text())["losses"]
    assert len(history) == 8 and history[:2] == losses and not state.exists()


def test_the_stages_that_processes_share() -> None:
    shared = ["decompose", "probe", "distill", "evaluate_initial", "evaluate"]
    assert [stage.name for stage in STAGES if stage.is_shared] == shared


def test_one_process_shares_with_nobody() -> None:
    tensor = torch.ones(2)
    processes.sum_([tensor])
    with processes.joined():
        assert (processes.count(), processes.number(), processes.is_first()) == (1, 0, True)
        assert processes.assign_by_cost({"a": 1.0, "b": 3.0}) == {"b": 0, "a": 0} and list(processes.share(3)) == [
            0,
            1,
            2,
        ]
        assert processes.gather_merged({1: "b", 0: "a"}) == {0: "a", 1: "b"}
        assert processes.sums(1.5, 2.0) == [1.5, 2.0] and processes.on_first_process(lambda: 3) == 3
        assert processes.agree_on_exit("word", 2) == ("word", 2)
    assert torch.equal(tensor, torch.ones(2))


def test_processes_of_another_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FlexrankError, match="WORLD_SIZE is 2, but torchrun did not start this"), processes.joined():
        pass
    for size in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", size)
        with processes.joined():
            assert processes.count() == 1


def test_a_process_group_of_the_callers_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(FlexrankError, match="torch.distributed has a process group already"),
        processes.joined(),
    ):
        pass
    assert processes.count() == 1 and signal.getsignal(signal.SIGTERM) is before


def test_the_dearest_items_fall_to_who_has_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_group", processes._Group(1, 3, None, 1.0))
    costs = {"a": 1.0, "b": 5.0, "c": 2.0, "d": 4.0, "e": 3.0}
    assert processes.assign_by_cost(costs) == {"b": 0, "d": 1, "e": 2, "c": 2, "a": 1}
    assert list(processes.share(5)) == [1, 4]


def test_tensors_are_summed_in_buckets_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "BUCKET", 40)
    tensors = [torch.ones(size) for size in (4, 5, 2, 30, 1)] + [torch.ones(1, dtype=torch.float64)]
    assert [[len(one) for one in bucket] for bucket in processes._buckets(tensors)] == [[4, 5], [2], [30], [1], [1]]


def test_a_process_is_waited_for_as_long_as_it_gives_signs_of_life() -> None:
    """Process 0 goes on giving them; process 1 gives none, then does and sets the key late."""
    group = processes._Group(0, 2, torch.distributed.HashStore(), 0.4)
    is_over = threading.Event()
    threading.Thread(target=group.send_heartbeats, args=(is_over,), daemon=True).start()
    with pytest.raises(processes.ProcessLost, match="process 1 has ended"):
        group.wait_for("key", 1)
    other = processes._Group(1, 2, group.store, 0.4)
    threading.Thread(target=other.send_heartbeats, args=(is_over,), daemon=True).start()
    threading.Timer(1.2, group.store.set, ("key", "")).start()
    start = time.monotonic()
    group.wait_for("key", 1)
    is_over.set()
    assert time.monotonic() - start > 1


def test_processes_alone_import_no_torch() -> None:
    code = "import sys, flexrank.processes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_memory_that_is_out_is_no_process_that_is_lost() -> None:
    with pytest.raises(torch.OutOfMemoryError), processes.raising_process_lost():
        raise torch.OutOfMemoryError("of this process")
    with (
        pytest.raises(processes.ProcessLost, match="another process does not answer"),
        processes.raising_process_lost(),
    ):
        raise RuntimeError("connection closed by peer")
