"""Every verb on the command line: results on standard output, and one line with exit 2 for a wrong input."""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import SafetensorError, safe_open

import flexrank as fr
from flexrank.cli.limits import parse_bytes, parse_parameters
from flexrank.run import stage_names
from tiny_runs import here, invoke, refused, settings, summary_of


@pytest.fixture(scope="module")
def config(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny run."""
    place = tmp_path_factory.mktemp("cli")
    values = settings(sources / "language", sources / "text.txt", place / "run")
    (place / "tiny.yaml").write_text(yaml.safe_dump(values))
    return place / "tiny.yaml"


@pytest.fixture(scope="module")
def printed(config: Path) -> dict[str, Any]:
    """What `flexrank run CONFIG --json` prints in a process of its own: nothing but the object."""
    done = python("-m", "flexrank", "run", str(config), "--json", PYTHONWARNINGS="error")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def finished(config: Path, printed: dict[str, Any]) -> Path:
    """The directory of that run."""
    return config.parent / "run"


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables, timeout=300)


def test_run_prints_its_summary_as_json(finished: Path, printed: dict[str, Any]) -> None:
    assert printed["executed"][0] == "decompose" and printed["executed"][-1] == "report"
    assert printed["rows"] == summary_of(finished)["rows"]


def test_run_ends_with_the_table(config: Path, finished: Path) -> None:
    result = invoke("run", config)
    assert result.exit_code == 0
    lines = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert [word for word in lines if word in ("base", "0.8", "0.5")] == ["base", "0.8", "0.5"]
    said = [line.partition(":")[0] for line in result.stderr.splitlines()]
    assert said[: len(stage_names())] == list(stage_names())


@pytest.mark.parametrize(
    ("verb", "key"),
    [
        ("decompose", "artefact"), ("probe", "errors"), ("allocate", "entries"), ("distill", "last_loss"),
        ("distill", "learning_rate"),
        ("evaluate", "rows"), ("deploy", "deployed"), ("report", "written"),
    ],
)  # fmt: skip
def test_each_verb_takes_the_run_directory_and_prints_json_last(verb: str, key: str, finished: Path) -> None:
    result = invoke(verb, finished, "--json")
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert key in last and last["directory"] == str(finished)
    assert last.get("executed", []) == []


def test_inspect_lists_what_an_artefact_holds(finished: Path, printed: dict[str, Any]) -> None:
    artefact = json.loads(invoke("inspect", finished / "deployed" / "0.50", "--json").stdout)
    row = next(row for row in printed["rows"] if row["budget"] == 0.5)
    assert (artefact["kind"], artefact["parameters"]) == ("deployed", row["params_model"])
    elastic, small = (invoke("inspect", finished / name).stdout for name in ("elastic", "deployed/0.50"))
    assert "elastic LlamaForCausalLM" in elastic and "mlp.down_proj" in elastic and "gauge-aligned" in small


@pytest.mark.usefixtures("verified_here")
def test_deploy_writes_one_size_within_the_limit(finished: Path, printed: dict[str, Any], tmp_path: Path) -> None:
    limit = printed["base"]["params_model"] * 2 // 3
    result = invoke("deploy", finished, "--max-params", limit, "--output", tmp_path / "small", "--json")
    assert result.exit_code == 0, result.output
    export = json.loads(result.stdout)["export"]
    artefact = json.loads(invoke("inspect", tmp_path / "small", "--json").stdout)
    assert limit // 2 < artefact["parameters"] == export["params_model"] <= limit
    counts = (
        f"{export['params_layers'] / 1e6:.4g} M parameters in factorised layers, {export['params_model'] / 1e6:.4g} M"
    )
    assert counts in result.stderr and f"{export['bytes'] / 1e6:.4g} MB on disk" in result.stderr
    card = (tmp_path / "small" / "README.md").read_text()
    assert f"# tiny at {export['relative_size']:.3g}\n" in card and 'from_pretrained("small")' in card


@pytest.mark.parametrize(
    ("parse", "text", "count"),
    [
        (parse_bytes, "200000000", 200_000_000), (parse_bytes, "200_000_000", 200_000_000),
        (parse_bytes, "200MB", 200_000_000), (parse_bytes, " 190.7 MiB ", 199_963_443),
        (parse_bytes, ".5gb", 500_000_000), (parse_bytes, "3kB", 3000), (parse_bytes, "1KiB", 1024),
        (parse_bytes, "2GiB", 2**31), (parse_bytes, "7B", 7),
        (parse_bytes, "9007199254740993", 2**53 + 1), (parse_bytes, "9" * 400, 10**400 - 1),
        (parse_parameters, "7B", 7 * 10**9), (parse_parameters, "1.5M", 1_500_000), (parse_parameters, "20k", 20_000),
    ],
)  # fmt: skip
def test_a_limit_may_have_a_unit(parse: Any, text: str, count: int) -> None:
    """Of parameters B is a billion, of bytes a byte."""
    assert parse(text) == count


@pytest.mark.usefixtures("verified_here")
def test_without_a_summary_a_card_has_no_measures_and_an_edited_one_is_refused(copied: Path, tmp_path: Path) -> None:
    (copied / "summary.json").write_text("{}")
    refusal = invoke("deploy", copied, "--budget", "0.5", "--output", tmp_path / "small")
    assert refusal.exit_code == 2 and "was edited after `report` wrote it" in refusal.stderr.splitlines()[-1]
    assert not (tmp_path / "small").exists()
    (copied / "summary.json").unlink()
    assert invoke("deploy", copied, "--budget", "0.5", "--output", tmp_path / "small").exit_code == 0
    card = (tmp_path / "small" / "README.md").read_text()
    assert "# LlamaForCausalLM, deployed\n" in card and "## Sizes" not in card


def test_the_version_is_the_packages() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, metadata.version("flexrank") + "\n")
    assert fr.__version__ == metadata.version("flexrank")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run", "nowhere.yaml"], "nowhere.yaml: no such config file"),
        (["run"], "Missing argument 'CONFIG'"),
        (["walk"], "No such command 'walk'"),
        (["run", "CONFIG", "--fast"], "No such option: --fast"),
        (["run", "CONFIG", "--set", "distilation.steps=3"], "did you mean 'distillation'?"),
        (["probe", "CONFIG", "--set", "probe.levels=1"], "probe.levels is 1"),
        (["run", "CONFIG", "--set", "model=./nowhere", "--set", "output=OUT"], "./nowhere"),
        (["run", "CONFIG", "--set", "output=CONFIG"], "is a file; the run directory needs another place"),
        (["deploy", "CONFIG", "--budget", "0"], "--budget is 0.0; it is a fraction in (0, 1]"),
        (["deploy", "CONFIG", "--budget", "1.5"], "--budget is 1.5"),
        (["deploy", "CONFIG", "--max-bytes", "-3"], "--max-bytes is -3"),
        (["deploy", "CONFIG", "--max-bytes", "200M"], "'200M' is not a number of bytes, such as 200000000, 200MB"),
        (["deploy", "CONFIG", "--max-bytes", "1__0"], "'1__0' is not a number of bytes"),
        (["deploy", "CONFIG", "--max-params", "7GB"], "'7GB' is not a number of parameters, such as 1500000, 1.5M"),
        (["deploy", "CONFIG", "--max-latency-ms", "0"], "--max-latency-ms is 0"),
        (["deploy", "CONFIG", "--max-latency-ms", "nan"], "--max-latency-ms is nan; it is a finite number above 0"),
        (["deploy", "CONFIG", "--max-latency-ms", "inf"], "--max-latency-ms is inf"),
        (["deploy", "CONFIG", "--output", "OUT"], "--output needs --budget"),
        (["deploy", "CONFIG", "--tune", "5"], "--tune needs --budget"),
        (["deploy", "CONFIG", "--refit"], "--refit needs --budget"),
        (["deploy", "CONFIG", "--budget", "0.5", "--tune", "5", "--refit"], "without training; give one of them"),
        (["deploy", "CONFIG", "--budget", "0.5", "--tune", "-1"], "--tune is -1; it is a number of steps"),
        (["deploy", "CONFIG", "--budget", "0.5", "--output", "HERE"], "exists and is not a deployed model"),
        (["inspect", "nowhere"], "nowhere"),
        (["inspect", "HERE"], "not an artefact"),
        (["report", "HERE"], "summary.json"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(arguments: list[str], part: str, config: Path, tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("mine")
    for name, place in {"CONFIG": config, "OUT": tmp_path / "out", "HERE": tmp_path}.items():
        arguments = [argument.replace(name, str(place)) for argument in arguments]
    assert part in refused(*arguments)
    assert (tmp_path / "keep.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} <= {"keep.txt", "out"}


def test_a_budget_below_what_can_be_reached_is_one_line(finished: Path) -> None:
    result = invoke("deploy", finished, "--budget", "0.0001")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: budget=0.0001 is too small")


def test_an_edited_artefact_is_one_line(copied: Path) -> None:
    state = copied / "elastic" / "elastic.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    assert "elastic.safetensors" in refused("inspect", copied / "elastic")


@pytest.mark.parametrize(
    ("where", "error", "part"),
    [
        ("run.directory.RunDirectory.keep_config", OSError(28, "No space left", "/disk/t"), "/disk/t: No space left"),
        ("artefacts.tensors.save_file", SafetensorError("No space left"), "cannot be written (No space left)"),
    ],
)
def test_a_full_disk_is_one_line(
    where: str, error: Exception, part: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"flexrank.{where}", full)
    assert part in refused("run", config, "--set", f"output={tmp_path / 'run'}")


@pytest.mark.parametrize("limit", [100, 60_000])
def test_a_disk_that_fills_up_leaves_whole_files_alone(limit: int, config: Path, tmp_path: Path) -> None:
    """The system itself refuses bytes beyond the limit of a file, in the midst of the config or a tensor."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        "from flexrank.cli import main; main()"
    )
    done = python("-c", code, "run", str(config), "--set", f"output={tmp_path / 'run'}")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: ") and "File too large" in last, done.stderr
    assert "Traceback" not in done.stderr
    left = list(tmp_path.rglob("*"))
    assert not [path for path in left if path.name.endswith((".aside", ".old", ".was"))]
    for path in left:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                assert file.keys()


@pytest.mark.parametrize("where", ["weight", "activation"])
def test_a_value_that_is_not_finite_is_named_and_nothing_is_left(
    where: str, config: Path, sources: Path, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    place = Path(shutil.copytree(sources / "language", tmp_path / "model"))
    model = LlamaForCausalLM.from_pretrained(place)
    block = model.model.layers[1]  # its norm makes what the projections read
    (block.mlp.up_proj if where == "weight" else block.input_layernorm).weight.data.flatten()[3] = float("nan")
    model.save_pretrained(place)
    for method in ("datasvd", "svd"):
        values = [f"model={place}", f"output={tmp_path / 'run'}", f"decomposition.method={method}"]
        message = refused("run", config, *(part for value in values for part in ("--set", value)))
        assert "layers.1." in message and "finite" in message
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_one_line_that_says_how_to_continue(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    def stop(*_: object) -> float:
        signal.raise_signal(kind)
        return 0.0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("flexrank.probe._probe", stop)
    result = invoke("run", config, "--set", f"output={tmp_path / 'run'}")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted; the same command continues from here"
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.undo()
    assert invoke("probe", tmp_path / "run").exit_code == 0


def test_only_what_continues_says_so_when_interrupted(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flexrank.run.export_one", "flexrank.run.measure.measure_run"):
        monkeypatch.setattr(name, lambda *_: signal.raise_signal(signal.SIGINT))
    size = ("deploy", copied, "--budget", 0.6)
    commands: list[Any] = [(*size, "--tune", 2), (*size, "--refit"), ("measure", copied)]
    last = [invoke(*command).stderr.splitlines()[-1] for command in commands]
    assert last == ["interrupted; the same command continues from here", "interrupted", "interrupted"]


@pytest.mark.usefixtures("verified_here")
def test_a_size_is_chosen_by_latency(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexrank.deployment.latency.LEAST_SECONDS", 0.0)
    refusal = invoke("deploy", copied, "--max-latency-ms", 1e-4)  # a tenth of a microsecond
    assert refusal.exit_code == 2
    assert "max_latency_ms=0.0001 is too small; the smallest size takes" in refusal.stderr.splitlines()[-1]
    result = invoke("deploy", copied, "--max-latency-ms", 60000, "--json")
    assert result.exit_code == 0, result.output
    export = json.loads(result.stdout)["export"]
    largest = summary_of(copied)["rows"][0]["relative_size"]  # of those trained, where the elastic model ends
    assert export["max_latency_ms"] == 60000 and export["relative_size"] == largest < 1
    assert (copied / "exports" / "max_latency_ms-60000.0" / "flexrank.json").is_file()


def test_measure_times_every_size_and_writes_it(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexrank.run.measure.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("flexrank.run.measure.REPEATS", 1)
    monkeypatch.setattr("flexrank.run.measure.in_fresh_process", here)
    result = invoke("measure", copied, "--json")
    assert result.exit_code == 0, result.output
    measured, summary = json.loads(result.stdout), summary_of(copied)
    assert measured == {"directory": str(copied), **json.loads((copied / "measurement.json").read_text())}
    assert [row["name"] for row in measured["rows"]] == ["base", "0.8", "0.5"]
    tokens = [workload["tokens"] for workload in measured["workloads"]]
    assert tokens == [32, 4 * 32, 24]  # a block, a batch of them, and what is generated
    for row, size in zip(measured["rows"], [summary["base"], *summary["rows"]], strict=True):
        assert row["bytes"] == 4 * size["params_model"]
        assert len(row["times"]) == 3 and all(time["seconds"] > 0 and time["ratio"] > 0 for time in row["times"])
    assert "4 texts of 32 tokens" in result.stderr and "24 tokens generated" in result.stderr


#: Runs the command line as if these packages were not installed.
WITHOUT = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from flexrank.cli import main
main()
"""


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        (["transformers", "huggingface_hub", "tokenizers"], "is not installed: pip install 'flexrank[hf]'"),
        (["huggingface_hub"], "huggingface_hub is not installed: pip install 'flexrank[hf]'"),
        (["tokenizers"], "tokenizers is not installed: pip install 'flexrank[hf]'"),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(
    packages: list[str], message: str, config: Path, tmp_path: Path
) -> None:
    program = WITHOUT.format(packages=packages)
    done = python("-c", program, "run", str(config), "--set", f"output={tmp_path / 'run'}")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


def test_quiet_prints_nothing(copied: Path) -> None:
    result = invoke("--quiet", "distill", copied, "--set", "distillation.steps=2", "--json")
    assert result.exit_code == 0 and result.stderr == "" and json.loads(result.stdout)["executed"] == ["distill"]


def test_help_loads_no_transformers_and_no_matplotlib() -> None:
    code = (
        "import sys; from flexrank import cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'transformers', 'matplotlib', 'scipy', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "decompose" in done.stdout and "..." not in done.stdout.partition("Commands:")[2]
