"""A step of several batches is that of one batch of all their rows."""

import copy
from typing import Any

import pytest
import torch
from trainings import SMALL, batches

from flexrank.distill import distill_
from flexrank.distill.objectives import FeatureObjective, LogitObjective
from flexrank.nn.switch import use_profile
from tiny import build, chain_of, nest, relative


def test_accumulated_batches_give_the_loss_and_gradients_of_all_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: plain autograd, before AdamW's step, where a factor of all gradients is lost."""
    teacher, model, data = build("perceptron"), nest(build("perceptron")), batches("perceptron")[:2]
    twin, found = copy.deepcopy(model), dict[str, torch.Tensor]()
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda _: found.update((n, p.grad.clone()) for n, p in model.named_parameters())
    )
    settings = {"method": "paper", "steps": 1, "accumulation": 2, "max_norm": 1e9, "objective": FeatureObjective()}
    (loss,) = distill_(model, teacher, data, [SMALL], **settings).losses
    with use_profile(twin, SMALL):
        rows = torch.cat(data)
        whole = (twin(rows) - teacher(rows)).square().sum() / teacher(rows).square().sum()
    names, parameters = zip(*twin.named_parameters(), strict=True)
    assert loss == pytest.approx(whole.item(), rel=1e-5) and found.keys() == set(names)
    for name, gradient in zip(names, torch.autograd.grad(whole, parameters), strict=True):
        torch.testing.assert_close(found[name], gradient[: len(found[name])], rtol=1e-4, atol=1e-6)


class Plain:
    """As `LogitObjective`, without terms."""

    def target(self, output: Any, batch: Any) -> torch.Tensor:
        return LogitObjective().target(output, batch)

    def loss(self, output: Any, target: torch.Tensor, batch: Any) -> torch.Tensor:
        return LogitObjective().loss(output, target, batch)


class Own(LogitObjective):
    """A loss of its own, which the terms of its class do not give."""

    def loss(self, output: Any, target: torch.Tensor, batch: Any) -> torch.Tensor:
        return 3 * super().loss(output, target, batch)


def test_accumulated_batches_weigh_as_their_tokens_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one batch of all rows, where one half has 20 real tokens and the other 6; without terms, the mean."""
    ids = torch.randint(3, 60, (4, 10), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(10) < torch.tensor([10, 10, 3, 3]).unsqueeze(1)).long()
    whole = {"input_ids": ids, "attention_mask": mask}
    parts = [{key: value[rows] for key, value in whole.items()} for rows in (slice(0, 2), slice(2, 4))]
    found: dict[str, torch.Tensor] = {}

    def taken(data: list[Any], objective: Any) -> tuple[float, torch.Tensor]:
        model = nest(build("gpt2"))

        def keep(_: Any) -> None:
            found.update({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})

        monkeypatch.setattr(torch.optim.AdamW, "step", keep)
        settings = {"steps": 1, "accumulation": len(data), "max_norm": 1e9, "method": "paper"}
        (loss,) = distill_(
            model, build("gpt2"), data, [chain_of(model, (0.4,)).entries[0].profile], objective=objective, **settings
        ).losses
        return loss, torch.cat([found[name].flatten() for name in sorted(found)])

    loss, gradient = taken([whole], LogitObjective())
    assert taken(parts, LogitObjective())[0] == pytest.approx(loss, rel=1e-5)
    assert relative(taken(parts, LogitObjective())[1], gradient) < 1e-4
    halves = [taken([part], LogitObjective())[0] for part in parts]
    assert sum(halves) / 2 != pytest.approx(loss, rel=1e-2)
    assert taken(parts, Plain())[0] == pytest.approx(sum(halves) / 2, rel=1e-5)
    assert taken(parts, Own())[0] == pytest.approx(3 * sum(halves) / 2, rel=1e-5)


def test_the_first_step_of_balanced_losses_weighs_its_batches_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a running mean yet; the losses of the two batches differ a hundredfold."""

    def direction(data: list[torch.Tensor]) -> torch.Tensor:
        model, found = nest(build("perceptron")), list[torch.Tensor]()

        def keep(_: Any) -> None:
            found.extend(one.grad.flatten() for one in model.parameters() if one.grad is not None)

        monkeypatch.setattr(torch.optim.AdamW, "step", keep)
        settings = {"steps": 1, "accumulation": len(data), "max_norm": 1e9, "objective": FeatureObjective()}
        distill_(model, build("perceptron"), data, [SMALL], **settings)
        return torch.cat(found) / torch.cat(found).norm()

    first, second = batches("perceptron")[:2]
    whole = direction([torch.cat([first, 0.1 * second])])
    for data in ([first, 0.1 * second], [0.1 * second, first]):
        assert relative(direction(data), whole) < 1e-5
