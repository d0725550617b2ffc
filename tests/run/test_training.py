"""Training by a run's settings: one size alone before its export, and which sizes consolidation has cost."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.artefacts.elastic import load_elastic
from flexrank.data.batches import call_model
from flexrank.distill import distill_
from flexrank.distill.objectives import LogitObjective
from flexrank.distill.step import Step
from flexrank.hf.models import hidden_states, load_model
from flexrank.nn.switch import use_profile
from flexrank.run import export_one, run_stages
from flexrank.run.config import load_config
from flexrank.run.training import autocast_dtype, log_losers, probe_losses
from tiny import relative

pytestmark = pytest.mark.usefixtures("verified_here")
#: Three steps: half as many as the run's six, so that its warm-up of one is none.
TUNE = 3


def tuned(directory: Path) -> dict[str, Any]:
    return export_one(run_stages(load_config(directory), "slack"), {"budget": 0.5}, tune=TUNE)


def test_a_size_is_trained_alone_from_the_shared_weights(copied: Path) -> None:
    """Oracle: the same steps of `distill_` on the artefact, at this size alone."""
    elastic = (copied / "elastic" / "elastic.safetensors").read_bytes()
    export = tuned(copied)
    assert (copied / "elastic" / "elastic.safetensors").read_bytes() == elastic and not (copied / "tuning").exists()
    work = run_stages(load_config(copied), "slack").workspace
    model, chain = load_elastic(copied / "elastic")
    profile = chain.at(0.5)
    with use_profile(model, profile):
        shared = work.judge(model)["nats_per_token"]
    objective = LogitObjective(hidden_weight=4.0)
    settings = {"steps": TUNE, "learning_rate": 1e-3, "objective": objective, "seed": work.config.seed}
    settings["autocast"] = autocast_dtype("auto", torch.device("cpu"))
    with hidden_states(model, work.base):
        distill_(model, work.base, work.samples.training, [profile], **settings)
    small, batch = load_model(export["directory"], "language"), work.samples.example
    with torch.no_grad(), use_profile(model, profile):
        assert relative(call_model(small, batch).logits, call_model(model, batch).logits) < 1e-4
        assert export["quality"]["nats_per_token"] == pytest.approx(work.judge(model)["nats_per_token"], rel=1e-4)
    assert export["shared"]["nats_per_token"] == pytest.approx(shared, rel=1e-4) != export["quality"]["nats_per_token"]


def test_interrupted_tuning_goes_on_to_the_same_bits(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tuned(copied)
    state = Path(whole["directory"], "model.safetensors")
    expected, take = state.read_bytes(), Step.take

    def stop(self: Step, items: Any, parts: int, number: int, *usual: Any) -> float:
        if number == 2:
            raise KeyboardInterrupt
        return take(self, items, parts, number, *usual)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "take", stop)
        with pytest.raises(KeyboardInterrupt):
            tuned(copied)
    assert list((copied / "tuning").iterdir()) and state.read_bytes() == expected
    assert tuned(copied) == whole and state.read_bytes() == expected


def test_a_run_says_which_sizes_are_worse_than_before(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flexrank"):
        log_losers([0.3, 0.8, 0.9], [1.0, 0.5, 0.2], [0.9, 0.6, 0.3])
        log_losers([0.3], [1.0], [1.0])
    worse, none = caplog.messages
    assert worse.endswith("than before, on the probe's samples: 0.8, 0.9") and none.startswith("distill: every size")


def test_losses_are_those_of_each_profile(copied: Path) -> None:
    """Oracle: KL of the probe's samples by torch, batch by batch."""
    work = run_stages(load_config(copied), "slack").workspace
    model, chain = load_elastic(copied / "elastic")
    profiles = [entry.profile for entry in chain.requested]
    for profile, loss in zip(profiles, probe_losses(work, model, profiles), strict=True):
        total, rows = 0.0, 0
        with torch.no_grad(), use_profile(model, profile):
            for batch in work.samples.probe:
                own, wanted = (
                    call_model(one, batch).logits.log_softmax(-1).flatten(0, 1) for one in (model, work.base)
                )
                total += float((wanted.exp() * (wanted - own)).sum())
                rows += len(own)
        assert loss == pytest.approx(total / rows, rel=1e-4)
