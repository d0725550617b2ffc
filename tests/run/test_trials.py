"""The learning rate of a run whose configuration has none: short trials, and what they are scored by."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.artefacts.elastic import load_elastic
from flexrank.data.batches import call_model
from flexrank.distill import distill_
from flexrank.distill.objectives import LogitObjective
from flexrank.distill.step import require_finite
from flexrank.errors import DivergedError, FlexrankError
from flexrank.files import read_json, write_json
from flexrank.hf.models import hidden_states
from flexrank.nn.switch import use_profile
from flexrank.run import run_stages, sizes, trials
from flexrank.run.config import load_config
from flexrank.run.directory import RunDirectory
from flexrank.run.dry_run import dry_run
from flexrank.run.sizes import Sizes
from flexrank.run.stages import read_chain
from flexrank.run.training import autocast_dtype
from flexrank.run.trials import choose_rate, minimum
from flexrank.run.workspace import Workspace


def workspace(directory: Path, *overrides: str) -> Workspace:
    return Workspace(load_config(directory, ["distillation.learning_rate=null", *overrides]), RunDirectory(directory))


def choose(work: Workspace) -> float:
    return choose_rate(work, read_chain(work), "f" * 20, None)


@pytest.mark.parametrize("start", range(-9, 10, 3))
@pytest.mark.parametrize("lowest", [-8.4, -3.0, -0.25, 0.0, 0.4, 6.49, 8.0])
def test_the_minimum_of_a_parabola_is_found_from_anywhere(start: int, lowest: float) -> None:
    asked: list[int] = []

    def cost(position: int) -> float:
        asked.append(position)
        return 3 * (position - lowest) ** 2 - 7

    assert minimum(cost, start, -20, 20) == pytest.approx(lowest)
    assert set(asked) <= set(range(min(start, math.floor(lowest)) - 1, max(start, math.ceil(lowest)) + 2))


def test_the_minimum_stays_within_the_ends_and_leaves_what_diverges() -> None:
    assert minimum(lambda n: n, 0, -5, 5) == -5 and minimum(lambda n: -n, 0, -5, 5) == 5
    assert minimum(lambda n: math.inf if n > 1 else -n, 0, -5, 5) == 1
    assert minimum(lambda n: math.inf if n > -3 else (n + 4.25) ** 2, 0, -9, 5) == pytest.approx(-4.25)
    assert minimum(lambda n: math.inf if n > -3 else -n, 0, -9, 5) == -3
    assert minimum(lambda _: math.inf, 0, -5, 5) == -5 and minimum(lambda _: 1.0, 0, -5, 5) == 0


def test_trials_go_towards_the_least_cost(
    copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle by hand: a parabola in the logarithm of the rate, with its minimum at 10 ** -2.65; twice that is taken."""
    tried: list[tuple[float, int]] = []

    def trial(work: Any, chain: Any, rate: float, steps: int, weights: Any) -> float:
        tried.append((rate, steps))
        return (math.log10(rate) + 2.65) ** 2

    monkeypatch.setattr(trials, "_trial", trial)
    work = workspace(copied, "distillation.steps=1150")
    with caplog.at_level(logging.INFO, "flexrank"):
        assert choose(work) == pytest.approx(2 * 10**-2.65, rel=0.02)
    assert tried == [(1e-3, 46), (3.2e-4, 46), (3.2e-3, 46), (1e-2, 46)]
    assert caplog.messages[-1] == "distill: the learning rate is 0.0045, by 4 trials of 46 steps"
    monkeypatch.setattr(trials, "_trial", lambda *_: pytest.fail("a finished trial is not repeated"))
    assert choose(work) == pytest.approx(2 * 10**-2.65, rel=0.02)


def test_a_rate_that_diverges_is_not_chosen(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle by hand: the first rate, 10 ** -3.5, is the best; twice that may diverge, as three times that does."""
    monkeypatch.setattr(trials, "_trial", lambda *given: None if given[2] > 5e-4 else -math.log10(given[2]))
    assert choose(workspace(copied, "distillation.steps=400")) == 3.2e-4


def test_a_model_that_always_diverges_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr(trials, "_trial", lambda *given: rates.append(given[2]))
    with pytest.raises(FlexrankError, match="every learning rate on trial diverges"):
        choose(workspace(copied, "distillation.steps=400"))
    assert sorted(rates) == [1e-6, 3.2e-6, 1e-5, 3.2e-5, 1e-4, 3.2e-4, 1e-3]


@pytest.mark.parametrize(("steps", "rate", "wanted"), [(199, "null", 1e-4), (0, "null", 1e-4), (4000, "0.02", 0.02)])
def test_no_trials_of_a_short_run_or_of_a_given_rate(
    steps: int, rate: str, wanted: float, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_trial", lambda *_: pytest.fail("there is a trial"))
    work = workspace(copied, f"distillation.steps={steps}", f"distillation.learning_rate={rate}")
    assert choose(work) == wanted and not (copied / "partial").exists()


@pytest.mark.parametrize(("steps", "wanted"), [(200, 8), (1999, 79), (100_000, 80)])
def test_a_trial_is_a_small_share_of_the_run(
    steps: int, wanted: int, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(trials, "_trial", lambda *given: seen.append(given[3]) or 1.0)  # all are as good
    assert choose(workspace(copied, f"distillation.steps={steps}")) == 6.3e-4 and seen == [wanted] * 3


def test_a_trial_is_scored_by_the_cube_roots_of_its_losses(copied: Path) -> None:
    """Oracle: the same steps by `distill_` on the decomposed model, and KL of the probe's samples by torch."""
    work = workspace(copied)
    chain, (model, _) = read_chain(work), load_elastic(copied / "elastic_initial")
    objective = LogitObjective(hidden_weight=4.0)
    settings: dict[str, Any] = {"steps": 4, "learning_rate": 2e-3, "objective": objective, "seed": work.config.seed}
    settings |= {"autocast": autocast_dtype("auto", torch.device("cpu")), "weights": [1.0, 3.0], "warmup_steps": 1}
    with hidden_states(model, work.base):
        distill_(model, work.base, work.samples.training, chain, **settings)
    roots = list[float]()
    for entry in chain.requested:
        total, rows = 0.0, 0
        for batch in work.samples.probe:
            with torch.no_grad(), use_profile(model, entry.profile):
                own, wanted = (
                    call_model(one, batch).logits.log_softmax(-1).flatten(0, 1) for one in (model, work.base)
                )
            total, rows = total + float((wanted.exp() * (wanted - own)).sum()), rows + len(own)
        roots.append((total / rows) ** (1 / 3))
    assert trials._trial(work, chain, 2e-3, 4, [1.0, 3.0]) == pytest.approx((roots[0] + 3 * roots[1]) / 4, rel=1e-4)


def test_a_trial_that_diverges_is_worse_than_any_other(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DivergedError, match="the loss is nan at step 3"):
        require_finite(math.nan, 3, "loss")
    work = workspace(copied)
    assert trials._trial(work, read_chain(work), 1e30, 4, None) is None
    monkeypatch.setattr(trials, "probe_losses", lambda *_: [1.0, math.nan])
    assert trials._trial(work, read_chain(work), 1e-4, 4, None) is None
    monkeypatch.setattr(trials, "probe_losses", lambda *_: [-1e-9, 8.0])
    assert trials._trial(work, read_chain(work), 1e-4, 4, None) == 1.0


def test_trials_leave_no_trace_also_where_a_run_is_interrupted_amid_them(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a run that is given the rate which trials chose gives the same weights, to the bit."""
    monkeypatch.setattr(trials, "LEAST", 1)
    monkeypatch.setattr(trials, "SHARE", 3)
    weights = "distillation.weights=[3, 1]"
    config = load_config(copied, ["distillation.learning_rate=null", weights])
    trial, rates = trials._trial, list[float]()

    def stop(work: Any, chain: Any, rate: float, *rest: Any) -> float | None:
        assert rest == (2, (1, 3))  # steps, and weights in the order of the chain
        rates.append(rate)
        if len(rates) == 3:
            raise KeyboardInterrupt
        return trial(work, chain, rate, *rest)

    monkeypatch.setattr(trials, "_trial", stop)
    with pytest.raises(KeyboardInterrupt):
        run_stages(config, "distill")
    run_stages(config, "distill")
    assert len(set(rates)) == len(rates) - 1  # only the interrupted trial is repeated
    assert not (copied / "partial").exists()
    artefact, history = copied / "elastic" / "elastic.safetensors", read_json(copied / "history.json")
    chosen = artefact.read_bytes()
    monkeypatch.setattr(trials, "_trial", lambda *_: pytest.fail("there is a trial"))
    given = load_config(copied, [f"distillation.learning_rate={history['learning_rate']}", weights])
    assert run_stages(given, "distill").executed == ("distill",)
    assert artefact.read_bytes() == chosen and read_json(copied / "history.json") == history


def test_a_size_is_tuned_at_the_rate_of_its_run(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(copied / "history.json", read_json(copied / "history.json") | {"learning_rate": 0.125})
    rates: list[float] = []
    monkeypatch.setattr(sizes, "train_", lambda *given: rates.append(given[4]))
    ours = Sizes(workspace(copied))
    ours.tune_(ours.chain.at(0.5), 3, {"budget": 0.5})
    assert rates == [0.125]


def test_a_size_made_by_itself_has_slack_for_its_own_weights(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own slack, and what was chosen before, are of the shared weights."""
    chosen: list[Any] = []
    choose = sizes.choose_slack

    def record(work: Any, model: Any, *rest: Any) -> Any:
        chosen.append((model, choose(work, model, *rest)))
        return chosen[-1][1]

    monkeypatch.setattr(sizes, "choose_slack", record)
    ours = Sizes(workspace(copied))
    profile = ours.chain.at(0.5)
    ours.refit_(profile, {"budget": 0.5})
    ((model, slack),) = chosen
    assert model is ours._own and ours.slack_for(profile) is slack and len(chosen) == 1


@pytest.mark.parametrize(("steps", "rate", "count"), [(200, "null", 1), (199, "null", 0), (200, "1e-4", 0)])
def test_a_dry_run_says_that_there_will_be_trials(steps: int, rate: str, count: int, copied: Path) -> None:
    config = load_config(copied, [f"distillation.steps={steps}", f"distillation.learning_rate={rate}"])
    assert sum("3 to 7 trials of 8 steps" in note for note in dry_run(config)["notes"]) == count
