"""Any configuration in a comparison: which samples score it, its dtype, and what its finished parts depend on."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexrank import FlexrankError
from flexrank.run.config import RunConfig, parse_config
from research.baselines.trained import TRAINED_METHODS
from research.benches import compare, training_benchmarks, training_free
from research.experiment import Request
from tiny import same_state
from tiny_runs import settings


def config_of(sources: Path, tmp_path: Path, **changes: dict[str, Any]) -> RunConfig:
    keys: dict[str, Any] = settings(sources / "language", sources / "text.txt", tmp_path / "unused", "language")
    keys["distillation"] |= {"steps": 8}
    for section, values in changes.items():
        keys[section] = {**keys.get(section, {}), **values}
    return parse_config(keys)


def test_trials_and_tables_are_scored_on_other_samples(sources: Path, tmp_path: Path) -> None:
    """Oracle: the trained comparison's own halves, and no sample in both."""
    config = config_of(sources, tmp_path)
    (benchmark,) = training_benchmarks.training_benchmarks(Request(tmp_path, config=config))
    scores = []
    for half in ("reporting", "tuning"):
        (one,) = training_free.benchmarks(Request(tmp_path, config=config, half=half))
        subject, (other, _) = one.subject(0), benchmark.subject_and_batches(0, half)
        halved = subject.decomposed("datasvd")
        scores.append(subject.score(halved)["nats_per_token"])
        assert scores[-1] == pytest.approx(other.score(halved)["nats_per_token"], rel=1e-6)
    assert scores[0] != scores[1]


def test_models_stored_in_bfloat16_are_compared_in_float32(sources: Path, tmp_path: Path) -> None:
    stored = transformers.AutoModelForCausalLM.from_pretrained(sources / "language")
    stored.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    transformers.AutoTokenizer.from_pretrained(sources / "language").save_pretrained(tmp_path / "half")
    config = config_of(sources, tmp_path).model_copy(update={"model": str(tmp_path / "half")})
    request = Request(tmp_path, config=config)
    (one,), (benchmark,) = training_free.benchmarks(request), training_benchmarks.training_benchmarks(request)
    for teacher in (one.subject(0).teacher, benchmark.subject_and_batches(0, "tuning")[0].teacher):
        assert {parameter.dtype for parameter in teacher.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "both"),
    [({"temperature": 3.0}, True), ({"batch_size": 3}, False), ({"hidden_weight": 0.5}, False)],
)
def test_finished_parts_are_of_one_training(change: dict[str, Any], both: bool, sources: Path, tmp_path: Path) -> None:
    first, second = config_of(sources, tmp_path), config_of(sources, tmp_path, distillation=change)
    facts = [training_benchmarks.training_benchmarks(Request(tmp_path, config=one))[0].facts for one in (first, second)]
    assert facts[0] != facts[1]
    facts = [training_free.benchmarks(Request(tmp_path, config=one))[0].facts for one in (first, second)]
    assert (facts[0] != facts[1]) == both


def test_a_half_of_the_configurations_own_is_refused(sources: Path, tmp_path: Path) -> None:
    config = config_of(sources, tmp_path, data={"half": "tuning"})
    for found in (training_free.benchmarks, training_benchmarks.training_benchmarks):
        with pytest.raises(FlexrankError, match="data.half is tuning; leave it out, settings are tried on the tuning"):
            found(Request(tmp_path, config=config))


def test_keys_that_a_comparison_does_not_use_are_named(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = settings(sources / "language", sources / "text.txt", tmp_path / "unused", "language")
    keys = {name: usual[name] for name in ("name", "task", "model", "output", "data")} | {"dtype": "float32"}
    keys |= {"decomposition": {"method": "svd"}, "probe": {"levels": 3, "spacing": "ranks"}}
    keys |= {"distillation": {"steps": 40, "accumulation": 2}, "allocation": {"budgets": [0.5]}}
    request = Request(tmp_path, config=parse_config(keys))
    for benchmarks, more in (
        (training_free.benchmarks, ", distillation.steps"),
        (training_benchmarks.training_benchmarks, ""),
    ):
        caplog.clear()
        benchmarks(request)
        unused = f"decomposition.method, distillation.accumulation{more}, dtype, probe.spacing"
        assert caplog.messages == [f"tiny: a comparison does not use {unused}"]


def test_flexrank_follows_hidden_states_whichever_method_the_configuration_names(sources: Path, tmp_path: Path) -> None:
    for given, weight in (({}, 4.0), ({"hidden_weight": 0.5}, 0.5)):
        config = config_of(sources, tmp_path, distillation={"method": "paper", **given})
        (benchmark,) = training_benchmarks.training_benchmarks(Request(tmp_path, config=config))
        assert benchmark.objective.hidden_weight == weight


def test_seeds_draw_other_samples_and_are_scored_on_the_same(sources: Path, tmp_path: Path) -> None:
    """With fewer samples scored than there are, which the configuration's own seed chooses."""
    config = config_of(sources, tmp_path, data={"evaluation": 4, "separator": "\n"})
    request = Request(tmp_path, config=config, seeds=2)
    (free,), (trained,) = training_free.benchmarks(request), training_benchmarks.training_benchmarks(request)
    for subjects in (map(free.subject, (0, 1)), (trained.subject_and_batches(seed, "tuning")[0] for seed in (0, 1))):
        first, second = subjects
        assert first.score(first.teacher) == second.score(first.teacher)
        assert not torch.equal(first.calibration[0]["input_ids"], second.calibration[0]["input_ids"])
    stream = config_of(sources, tmp_path, data={"streaming": True, "training": None})
    images = stream.model_copy(update={"data": stream.data.model_copy(update={"source": "images", "streaming": False})})
    for other in (stream, images):
        for found in (training_free.benchmarks, training_benchmarks.training_benchmarks):
            with pytest.raises(FlexrankError, match="only of 'text' in memory seeds draw another calibration"):
                found(Request(tmp_path, config=other, seeds=2))


def test_rivals_train_on_a_stream(sources: Path, tmp_path: Path) -> None:
    config = config_of(sources, tmp_path, data={"streaming": True, "training": None}, distillation={"steps": 8})
    (benchmark,) = training_benchmarks.training_benchmarks(Request(tmp_path, config=config))
    subject, batches = benchmark.subject_and_batches(0, "tuning")
    assert not isinstance(batches, Sequence)
    task = benchmark.training_task(subject, batches, {}, 0, 4, 4)
    before = copy.deepcopy(subject.teacher)
    (size, *_) = TRAINED_METHODS["matformer"].sizes(task, {"times_usual": 1.0})
    assert size is not None and not same_state(size[0], before)


def test_a_line_is_drawn_at_the_sizes_of_every_seed() -> None:
    """By hand: A3 lacks one size in each seed, SliceGPT the same size in both."""
    large, small = ({"share": share, "scores": {"nats": 2.0}} for share in (0.9, 0.5))
    runs = {"a3": [[large, None], [None, small]], "slicegpt": [[large, None], [large, None]]}
    sized = {name: {"published": [{"rows": rows} for rows in seeds]} for name, seeds in runs.items()}
    (axes,) = compare.draw({"tiny": {"dense": {"nats": 1.0}, "measure": "nats", "sized": sized}}).axes
    places = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert (places["a3"], places["slicegpt"]) == ([], [0.9])
