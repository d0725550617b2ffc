"""Wrong keys and values are one line that names them; right ones freeze to what was written."""

from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
import yaml

from flexrank.errors import FlexrankError
from flexrank.run.config import DistillationConfig, ProbeConfig, load_config, parse_config, write_config

LEAST = {"name": "tiny", "task": "embedding", "model": "somewhere"}


def test_the_least_config_has_the_papers_budgets_and_a_directory_by_name() -> None:
    config = parse_config(LEAST)
    assert config.allocation.budgets == (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
    assert config.directory == Path("runs/tiny")
    with pytest.raises(pydantic.ValidationError):
        config.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        ({}, 4.0),
        ({"method": "paper"}, 0.0),
        ({"hidden_weight": 0}, 0.0),
        ({"method": "paper", "hidden_weight": 2}, 2.0),
    ],
)
def test_hidden_states_are_followed_unless_the_paper_is(settings: dict[str, Any], weight: float) -> None:
    assert DistillationConfig(**settings).weight_of_hidden_states == weight


def test_what_is_written_is_read_back_to_the_same(tmp_path: Path) -> None:
    config = parse_config(LEAST | {"layers": {"exclude": ["pooler"]}, "deployment": {"slack": 4, "budgets": []}})
    write_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_a_run_directory_is_its_own_output(tmp_path: Path) -> None:
    write_config(parse_config(LEAST), tmp_path / "config.yaml")
    assert load_config(tmp_path).directory == tmp_path


@pytest.mark.parametrize(("text", "value"), [("off", "off"), ("'off'", "off"), ("bfloat16", "bfloat16")])
def test_off_needs_no_quotes(text: str, value: str, tmp_path: Path) -> None:
    """YAML reads it as false."""
    (path := tmp_path / "run.yaml").write_text("{name: a, task: language, model: b}")
    assert load_config(path, [f"distillation.autocast={text}"]).distillation.autocast == value
    with pytest.raises(FlexrankError, match="autocast"):
        load_config(path, ["distillation.autocast=on"])


def test_overrides_are_yaml_and_make_missing_sections(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(LEAST))
    overrides = ["distillation.steps=7", "distillation.learning_rate=1e-3", "allocation.budgets=[.25, .75]", "seed=3"]
    config = load_config(path, overrides)
    assert (config.distillation.steps, config.distillation.learning_rate, config.seed) == (7, 1e-3, 3)
    assert config.allocation.budgets == (0.75, 0.25)


@pytest.mark.parametrize(
    ("trained", "given", "deployed"),
    [
        ("[.9, .8]", "null", (0.8,)),
        ("[.8, .4, .6]", "null", (0.6,)),
        ("[.3]", "null", (0.3,)),
        ("[.9, .8]", "[.25, .5]", (0.5, 0.25)),
        ("[.9, .8]", "[]", ()),
    ],
)
def test_the_middle_size_is_deployed_if_no_other_is_asked_for(
    trained: str, given: str, deployed: tuple[float, ...], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(LEAST))
    config = load_config(tmp_path / "mine.yaml", [f"allocation.budgets={trained}", f"deployment.budgets={given}"])
    assert config.deployed_budgets == deployed


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("data: {half: tuning}\nseed: 1\ndata: {max_tokens: 64}\n", "data", 3),
        ("data:\n  half: tuning\n  max_tokens: 64\n  half: reporting\n", "half", 4),
    ],
)
def test_a_key_that_is_given_twice_is_refused(text: str, key: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(FlexrankError, match=f"mine.yaml: line {line} has the key '{key}' a second time; join the two"):
        load_config(tmp_path / "mine.yaml")


def test_a_section_with_nothing_in_it_is_that_of_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(LEAST) + "distillation:\n  # steps: 3\nprobe:\n")
    config = load_config(tmp_path / "mine.yaml", ["distillation.steps=5"])
    assert (config.distillation.steps, config.probe) == (5, ProbeConfig())


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("distilation.steps=3", ["'distilation'", "did you mean 'distillation'?"]),
        ("distillation.step=3", ["'distillation.step'", "did you mean 'distillation.steps'?"]),
        ("steps=3", ["'steps'", "did you mean 'distillation.steps'?"]),
        ("data.zzzzz=3", ["'data.zzzzz'", "data has source, path"]),
        ("probe.levels=ten", ["probe.levels is 'ten'", "valid integer"]),
        ("allocation.budgets=[0.5, 1.5]", ["allocation.budgets.1 is 1.5", "less than or equal to 1"]),
        ("deployment.budgets=[0]", ["deployment.budgets.0 is 0", "greater than 0"]),
        ("deployment.budgets=[.5, .5]", ["deployment.budgets is [0.5, 0.5]", "has a budget twice"]),
        ("allocation.budgets=[.5, .5]", ["allocation.budgets is [0.5, 0.5]", "has a budget twice"]),
        ("allocation.savings=ranks", ["allocation.savings 'ranks'", "'paper'"]),
        ("allocation.min_saving=1", ["allocation.min_saving is 1", "less than 1"]),
        ("allocation.min_saving=-0.1", ["allocation.min_saving is -0.1", "greater than or equal to 0"]),
        ("allocation={method: paper, min_saving: 0.1}", ["allocation.min_saving 0.1 belongs to method 'joint'"]),
        ("deployment.forms=measured", ["unknown key 'deployment.forms'", "deployment has budgets, dtype, slack"]),
        ("deployment.slack=-1", ["deployment.slack is -1", "'auto' or a whole number"]),
        ("deployment.slack=true", ["deployment.slack is True", "'auto' or a whole number"]),
        ("allocation.budgets=[1]", ["allocation.budgets has only 1", "add a smaller size"]),
        ("seed=99999999999999999999", ["seed is 99999999999999999999", "less than 9223372036854775808"]),
        ("layers.exclude=pooler", ["layers.exclude is 'pooler'", "a list in brackets"]),
        ("probe=3", ["probe is 3", "probe.levels"]),
        ("distillation.weights=[1, 2]", ["distillation.weights has 2 numbers", "has 8"]),
        ("distillation.top_k=0", ["distillation.top_k is 0", "greater than or equal to 1"]),
        ("distillation.learning_rate=.nan", ["distillation.learning_rate is nan"]),
        ("dtype=int8", ["dtype is 'int8'", "'bfloat16'"]),
        ("name=a/b", ["name is 'a/b'"]),
        ("data.source=text", ["data.path is missing", "reads a file"]),
        ("data.shuffle_buffer=10", ["data.shuffle_buffer is of a stream"]),
        ("distillation.top_k=5", ["distillation.top_k", "'embedding' does not have"]),
        ("distillation.temperature=2", ["temperature", "'embedding' does not have"]),
        ("task=classification", ["'stdlib-docs' does not fit task 'classification'"]),
        ("model.x=3", ["--set 'model.x=3'", "'model' is a value"]),
        ("steps", ["--set 'steps'", "KEY=VALUE"]),
        ("seed=[", ["--set 'seed=['", "not YAML"]),
        ("data.revision=2024-02-30", ["--set 'data.revision=2024-02-30'", "not YAML"]),
        (f"seed={'[' * 3000}", ["not YAML"]),
        ("data.separator=None", ["data.separator is 'None'; YAML reads None as text; write null"]),
        ("model=null", ["model is null; input should be a valid string"]),
        ("distillation.learning_rate=true", ["distillation.learning_rate is True; true and false are not numbers"]),
        ("data.batch_size=yes", ["data.batch_size is True; true and false are not numbers"]),
        ("seed=false", ["seed is False; true and false are not numbers"]),
        ("allocation.budgets=[true, .5]", ["allocation.budgets is [True, 0.5]; true and false are not numbers"]),
        ("data.calibration=8", ["data.calibration 8 is less than one batch of data.batch_size 32"]),
        ("data.path=''", ["data.path is ''", "at least 1 character"]),
        ("output=''", ["output is ''", "at least 1 character"]),
    ],
)
def test_a_wrong_override_is_one_line(override: str, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(LEAST))
    with pytest.raises(FlexrankError) as error:
        load_config(path, [override])
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_sharded_models_need_blocks_that_run_again_and_states_that_are_divided(tmp_path: Path) -> None:
    with pytest.raises(FlexrankError, match="^config: distillation: sharded needs gradient_checkpointing: true"):
        parse_config(LEAST | {"distillation": {"sharded": True}})
    keys = {"sharded": True, "gradient_checkpointing": True}
    with pytest.raises(FlexrankError, match="sharded needs optimizer: adamw, .* not adamw_8bit"):
        parse_config(LEAST | {"distillation": keys | {"optimizer": "adamw_8bit"}})
    assert parse_config(LEAST | {"distillation": keys}).distillation.sharded


@pytest.mark.parametrize("method", ["joint", "paper"])
@pytest.mark.parametrize("saving", [0, 0.25])
def test_every_method_takes_no_saving_and_the_default_one(method: str, saving: float, tmp_path: Path) -> None:
    config = parse_config(LEAST | {"allocation": {"method": method, "min_saving": saving}})
    write_config(config, tmp_path / "config.yaml")  # a config written out whole has the default of every key
    assert load_config(tmp_path / "config.yaml").allocation.min_saving == saving


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("name: [", "not YAML"), ("- a\n- b\n", "a mapping of keys"), (b"\xff\xfe\x00", "not YAML"),
        ("name: tiny\ntask: language\n", "key 'model' is missing"), ("seed: " + "1" * 5000, "not YAML"),
        ("data: {revision: 2024-02-30}", "not YAML"), ("name: " + "[" * 3000, "not YAML"),
        ("name: tiny\ntask: language\nmodle: x\n", "'modle'; did you mean 'model'"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_one_line(content: str | bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FlexrankError) as error:
        load_config(path)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_and_a_directory_without_a_run_have_their_own_messages(tmp_path: Path) -> None:
    with pytest.raises(FlexrankError, match="no such config file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(FlexrankError, match="is not a run directory"):
        load_config(tmp_path)


def test_the_examples_are_valid() -> None:
    for path in sorted((Path(__file__).parents[2] / "examples").glob("**/*.yaml")):
        assert load_config(path).name


@pytest.mark.parametrize(
    ("chosen", "own", "files", "wanted"),
    [
        ("null", "float32", "float32", "float32"), ("null", "float32", "bfloat16", "bfloat16"),
        ("null", "float32", "float16", "float16"), ("null", "bfloat16", "float32", "bfloat16"),
        ("null", "bfloat16", "float16", "bfloat16"), ("float32", "float32", "bfloat16", "float32"),
        ("float16", "float32", "float32", "float16"),
    ],
)  # fmt: skip
def test_exports_are_no_wider_than_the_files_unless_asked(
    chosen: str, own: str, files: str, wanted: str, tmp_path: Path
) -> None:
    write_config(parse_config(LEAST), tmp_path / "config.yaml")
    config = load_config(tmp_path, [f"deployment.dtype={chosen}", f"dtype={own}"])
    assert config.deployed_dtype(getattr(torch, files)) is getattr(torch, wanted)


def test_the_paper_trains_the_full_model_alone() -> None:
    config = parse_config(LEAST | {"allocation": {"budgets": [1]}, "distillation": {"method": "paper"}})
    assert config.allocation.budgets == (1.0,)


def test_a_tilde_is_the_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {"source": "text", "path": "~/a.txt", "held_out": "~/b.txt"}
    values = {"name": "one", "task": "language", "model": "none", "output": "~/{name}", "architecture": "~/c.json"}
    config = parse_config(values | {"data": paths})
    assert config.directory == tmp_path / "one" and config.architecture == str(tmp_path / "c.json")
    assert (config.data.path, config.data.held_out) == (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
