"""`flexrank deploy` of an elastic artefact that comes without its run, and of a size made alone."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch
import transformers

import flexrank as fr
import tiny
from flexrank.cli.deploying import sibling_path
from tiny_runs import invoke, refused, summary_of


@pytest.mark.usefixtures("verified_here")
def test_a_size_comes_of_an_elastic_artefact_without_its_run(copied: Path, tmp_path: Path) -> None:
    """Oracle: the artefact's own components at the profile of the budget."""
    elastic, small = tmp_path / "elastic", tmp_path / "small"
    (copied / "elastic").rename(elastic)
    result = invoke("deploy", elastic, "--budget", 0.6, "--output", small, "--json")
    model, _ = fr.load_elastic(elastic, 0.6)
    facts, batch = json.loads(result.stdout), tiny.token_batch()
    found = transformers.AutoModelForCausalLM.from_pretrained(small).eval()
    assert tiny.relative(found(**batch)[0], model(**batch)[0]) < 1e-4
    assert facts["directory"] == str(small) and facts["relative_size"] <= 0.6
    assert facts["params_model"] == sum(parameter.numel() for parameter in found.parameters())
    assert invoke("deploy", elastic, "--budget", 0.6).stdout == f"{tmp_path / 'elastic-budget-0.6'}\n"
    for arguments, message in (
        ([], "an elastic artefact; give --budget, --max-bytes or --max-params"),
        (["--budget", 0.6, "--tune", 3], "--set, --tune, --refit and --max-latency-ms need its run"),
        (["--budget", 0.6, "--refit"], "--set, --tune, --refit and --max-latency-ms need its run"),
        (["--max-latency-ms", 3], "an elastic artefact; --set"),
        (["--budget", 1e-6], "is too small"),
    ):
        refusal = invoke("deploy", elastic, *arguments)
        assert refusal.exit_code == 2 and message in refusal.stderr.splitlines()[-1]
    refusal = invoke("distill", elastic)
    assert (
        "of an elastic artefact `flexrank deploy` writes a size, and `flexrank inspect` lists them"
        in refusal.stderr.splitlines()[-1]
    )


def test_a_size_has_the_dtype_that_its_artefact_names(tmp_path: Path, verified_here: None) -> None:
    model = tiny.elastic("llama_tied")
    for dtype, found in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        fr.save_elastic(model, tiny.chain_of(model), tmp_path / "elastic", deployed_dtype=dtype)
        result = invoke("deploy", tmp_path / "elastic", "--budget", 0.5, "--output", tmp_path / "small", "--json")
        assert json.loads(result.stdout)["dtype"] == str(found).removeprefix("torch.")
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small").dtype is found
    limit = sum(path.stat().st_size for path in (tmp_path / "small").glob("*.safetensors"))
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small").num_parameters()
    invoke("deploy", tmp_path / "elastic", "--max-bytes", limit, "--output", tmp_path / "again")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").num_parameters() == wanted


def test_an_elastic_model_that_save_pretrained_wrote_is_no_artefact(tmp_path: Path) -> None:
    model = tiny.elastic("llama_tied")
    fr.save_elastic(model, tiny.chain_of(model), tmp_path / "elastic")
    fr.load_elastic(tmp_path / "elastic")[0].save_pretrained(tmp_path / "other")
    assert "written by save_pretrained, which keeps no layers; save it with" in refused("inspect", tmp_path / "other")


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_deployment_of_an_artefact_leaves_nothing(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    before, place = signal.getsignal(signal.SIGTERM), tmp_path / "empty"
    place.mkdir()
    monkeypatch.setattr("flexrank.deployment.exports._load_and_run", lambda *_: signal.raise_signal(kind))
    result = invoke("deploy", copied / "elastic", "--budget", 0.5, "--output", place / "small")
    assert result.exit_code == 130 and result.stderr.splitlines()[-1] == "interrupted"
    assert not list(place.iterdir()) and signal.getsignal(signal.SIGTERM) is before


def test_a_place_beside_a_directory_that_has_no_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs" / "small")
    assert sibling_path(Path("."), "dense") == tmp_path / "runs" / "small-dense"
    assert sibling_path(Path(".."), "dense") == tmp_path / "runs-dense"
    assert sibling_path(Path("a/b"), "dense") == Path("a/b-dense")


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize(
    ("options", "name", "column", "words"),
    [
        (
            ["--tune", "2"],
            "budget-0.5-tune-2",
            "tuned",
            ", then trained by itself for 2 steps; the table is of the others.",
        ),
        (
            ["--refit"],
            "budget-0.5-refit",
            "refitted",
            ". This one was then fitted by itself to the base model,",
        ),
    ],
)
def test_a_size_made_alone_shows_both_qualities(
    options: list[str], name: str, column: str, words: str, copied: Path
) -> None:
    result = invoke("deploy", copied, "--budget", "0.5", *options, "--json")
    assert result.exit_code == 0, result.output
    export = json.loads(result.stdout)["export"]
    assert Path(export["directory"]).name == name and words in (copied / "exports" / name / "README.md").read_text()
    assert ["quality", "shared", column] in [line.split() for line in result.stderr.splitlines()]
    (line,) = (line.split() for line in result.stderr.splitlines() if line.strip().startswith("nats_per_token"))
    assert line[1:] == [f"{export[key]['nats_per_token']:.4f}" for key in ("shared", "quality")]


def test_a_limit_below_the_smallest_size_names_that(finished: Path) -> None:
    refusal = invoke("deploy", finished, "--max-params", "100").stderr.splitlines()[-1]
    what = r"error: max_params=100 is too small: the smallest size has ([\d,]+) parameters and ([\d,]+) bytes, with its"
    found = re.match(what, refusal)
    assert found is not None, refusal
    least, octets = (int(number.replace(",", "")) for number in found.groups())
    row = next(row for row in summary_of(finished)["rows"] if row["budget"] == 0.5)
    assert 100 < least <= row["params_model"] and octets == 4 * least
    assert invoke("deploy", finished, "--max-params", least - 1).exit_code == 2
