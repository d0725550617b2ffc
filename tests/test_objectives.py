"""Losses and their gradients against torch's own, unchunked and in float64."""

import pytest
import torch
from torch.nn import functional

from flexrank.errors import FlexrankError
from flexrank.objectives import EmbeddingObjective, FeatureObjective, LogitObjective, objective_for


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_chunked_divergence_is_torchs(chunk: int, temperature: float) -> None:
    student = torch.randn(2, 5, 11, requires_grad=True)
    teacher = torch.randn(2, 5, 11)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    batch = {"attention_mask": mask}
    objective = LogitObjective(temperature, chunk)
    loss = objective.loss(student, objective.target(teacher, batch), batch)
    (loss * 3).backward()
    other = student.detach().double().requires_grad_()
    rows = mask.bool()
    expected = temperature**2 * functional.kl_div(
        (other[rows] / temperature).log_softmax(-1),
        (teacher.double()[rows] / temperature).log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )
    (expected * 3).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(student.grad.double(), other.grad, rtol=1e-4, atol=1e-7)


def test_divergence_of_equal_logits_is_zero_and_classification_needs_no_mask() -> None:
    logits = torch.randn(4, 7)
    objective = LogitObjective()
    assert float(objective.loss(logits, objective.target(logits, logits), logits)) == pytest.approx(0, abs=1e-7)
    far = objective.loss(-logits, objective.target(logits, logits), logits)
    expected = functional.kl_div(
        (-logits).log_softmax(-1), logits.log_softmax(-1), reduction="batchmean", log_target=True
    )
    torch.testing.assert_close(far, expected)


def test_embedding_loss_ignores_padding() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch = {"attention_mask": mask}
    teacher, student = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    for weight in (0.0, 0.5):
        objective = EmbeddingObjective(weight)
        loss = objective.loss(student, objective.target(teacher, batch), batch)
        expected = torch.zeros(())
        for row, count in ((0, 3), (1, 1)):
            a, b = student[row, :count].mean(0), teacher[row, :count].mean(0)
            expected = expected + (1 - functional.cosine_similarity(a, b, 0)) / 2
        rest = (student - teacher)[mask.bool()].square().sum() / teacher[mask.bool()].square().sum()
        torch.testing.assert_close(loss, expected + weight * rest)
        changed = student.clone()
        changed[1, 1:] = 9
        torch.testing.assert_close(objective.loss(changed, objective.target(teacher, batch), batch), loss)


def test_embeddings_that_the_model_pools_itself_are_compared_as_they_are() -> None:
    a, b = torch.randn(5, 8), torch.randn(5, 8)
    objective = EmbeddingObjective()
    loss = objective.loss(a, objective.target(b, b), b)
    torch.testing.assert_close(loss, (1 - functional.cosine_similarity(a, b)).mean())


def test_feature_loss_is_the_relative_squared_error() -> None:
    a, b = torch.randn(3, 5), torch.randn(3, 5)
    loss = FeatureObjective().loss(a, FeatureObjective().target(b, b), b)
    torch.testing.assert_close(loss, (a - b).square().sum() / b.square().sum())


def test_fisher_losses_have_the_fisher_as_second_moment() -> None:
    """Oracle: for logits z with p = softmax(z), E[g gᵀ] = diag(p) − p pᵀ; for a projection it is the identity."""
    z = torch.randn(1, 4).expand(60_000, 4).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(LogitObjective().fisher_loss(z, z), z)
    p = z[0].detach().softmax(-1)
    expected = torch.diag(p) - torch.outer(p, p)
    torch.testing.assert_close(gradient.T @ gradient / len(z), expected, rtol=0.1, atol=0.01)
    h = torch.randn(60_000, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(FeatureObjective().fisher_loss(h, h), h)
    torch.testing.assert_close(gradient.T @ gradient / len(h), torch.eye(3), rtol=0.1, atol=0.02)


def test_tasks_have_objectives() -> None:
    assert objective_for("language", temperature=2.0) == LogitObjective(2.0)
    assert objective_for("embedding", hidden_weight=0.5) == EmbeddingObjective(0.5)
    with pytest.raises(FlexrankError, match="task 'speech' is unknown"):
        objective_for("speech")
