"""The bench of a model larger than memory: its parts, without the model."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from flexrank.errors import FlexrankError
from research.benches import larger
from research.experiment import Request

TAKE = ["-c", "import time; taken = b'x' * 2**27; time.sleep(0.2)"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_process_has_its_own_memory_measured() -> None:
    done = larger._limited(TAKE, None)
    assert 2**27 < done["peak"] < 2**28 and done["seconds"] > 0.2
    with pytest.raises(FlexrankError, match="ended with 1 within None bytes: ZeroDivisionError"):
        larger._limited(["-c", "1 / 0"], None)


def test_a_process_above_the_limit_is_ended() -> None:
    try:
        with larger.memory_group(2**26):
            pass
    except (FlexrankError, FileNotFoundError):
        pytest.skip("needs a memory cgroup that may be written")
    assert larger._limited(TAKE, 2**26)["killed"]
    small = larger._limited(["-c", ""], 2**26)
    assert small["peak"] < 2**26 and not small["killed"]
    with larger.memory_group(2**26) as group:
        assert group.is_dir()
    assert not group.exists()


def test_bytes_over_seconds_and_the_disk(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: files of 3,000 and 500 bytes in 2 s, where the disk writes 1,000 a second."""
    (tmp_path / "pycode5m").mkdir()
    (tmp_path / "pycode5m" / "train_sample.txt").write_text((sources / "text.txt").read_text())
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    monkeypatch.setenv("FLEXRANK_ASSETS", str(tmp_path))
    monkeypatch.setattr(larger, "QUICK", larger.Form(sizes, 3))
    monkeypatch.setattr(larger, "write_rate", lambda _: 1000.0)
    limits, is_small = [], False

    def limited(arguments: Sequence[str], limit: int | None) -> dict[str, float]:
        limits.append(limit)
        place = tmp_path / ("other" if is_small else "work") / "large-Llama-of-1-run" / "run"
        for name, size in (("elastic_initial", 3000), ("elastic", 500)):
            (place / name).mkdir(parents=True, exist_ok=True)
            (place / name / "file").write_bytes(bytes(size))
        (place / "curvature.safetensors").write_bytes(bytes(100))
        return {"seconds": 2.0, "peak": 10**6, "killed": "allocate" in arguments and is_small}

    monkeypatch.setattr(larger, "_limited", limited)
    result = larger.run(Request(tmp_path / "work"))
    rows = {row[0]: row[1:] for row in result["tables"][0]["rows"]}
    assert rows["distill"] == [2.0, 1.0, 0.0035, 0.00175, 1.75]
    assert rows["allocate"][2] == 0.0001 and rows["load"] == [2.0, 1.0, None, None, None]
    model = result["data"]["model"]
    assert limits == [None, *[10**6 + model // 3] * 4] and result["claims"][0]["holds"]
    assert larger.run(Request(tmp_path / "work")) == result and len(limits) == 5
    is_small = True
    result = larger.run(Request(tmp_path / "other"))
    (claim,), rows = result["claims"], result["tables"][0]["rows"]
    assert not claim["holds"] and claim["here"] == "allocate is killed at 1 MB"
    assert [row[0] for row in rows] == ["decompose", "allocate"] and rows[1][3:] == [None] * 3
