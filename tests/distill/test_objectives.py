"""Losses and their gradients against torch's own, unchunked and in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from flexrank.distill import distillation_evaluator
from flexrank.distill.objectives import (
    EmbeddingObjective,
    FeatureObjective,
    FisherObjective,
    LogitObjective,
    objective_for,
)
from flexrank.errors import FlexrankError
from tiny import build


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
    q, p = ((logits[mask.bool()] / temperature).log_softmax(-1) for logits in (other, teacher.double()))
    expected = temperature**2 * functional.kl_div(q, p, reduction="batchmean", log_target=True)
    (expected * 3).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(student.grad.double(), other.grad, rtol=1e-4, atol=1e-7)
    alone = objective.loss(student.detach(), objective.target(teacher, batch), batch)  # a probe's, in fewer passes
    torch.testing.assert_close(alone.double(), expected.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wants_gradient", [True, False])
def test_a_class_that_the_teacher_rules_out_adds_nothing(wants_gradient: bool) -> None:
    """Oracle: the classes it leaves, alone. The student rules one of the two out as well."""
    teacher, student = torch.randn(3, 6), torch.randn(3, 6)
    teacher[:, [1, 4]] = student[:, 4] = -torch.inf
    kept = [0, 2, 3, 5]
    p, q = teacher[:, kept].double().log_softmax(-1), student.double().log_softmax(-1)[:, kept]
    expected = (p.exp() * (p - q)).sum() / 3
    objective = LogitObjective()
    student.requires_grad_(wants_gradient)
    loss = objective.loss(student, objective.target(teacher, teacher), teacher)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-7)
    if wants_gradient:
        loss.backward()
        wanted = (student.detach().softmax(-1) - teacher.softmax(-1)) / 3
        torch.testing.assert_close(student.grad, wanted, rtol=1e-5, atol=1e-7)


def test_what_only_the_student_rules_out_is_no_finite_loss() -> None:
    teacher, student = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, -torch.inf]])
    objective = LogitObjective()
    assert float(objective.loss(student, objective.target(teacher, teacher), teacher)) == torch.inf


def test_embeddings_of_an_encoder_decoder_are_of_its_decoders_tokens() -> None:
    """Oracle: means over the decoder's real tokens, by hand."""
    hidden, wanted = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    real = torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = {"attention_mask": torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]),
             "decoder_input_ids": torch.ones(2, 3, dtype=torch.long), "decoder_attention_mask": real}  # fmt: skip
    means = [torch.stack([one[0, :2].mean(0), one[1].mean(0)]).double() for one in (hidden, wanted)]
    cosine = 1 - functional.cosine_similarity(*means).mean()
    for weight in (0.0, 0.5):
        objective = EmbeddingObjective(weight)
        rows = real.bool()
        relative = (hidden - wanted)[rows].square().sum() / wanted[rows].square().sum()
        loss = objective.loss(hidden, objective.target(wanted, batch), batch)
        assert float(loss) == pytest.approx(float(cosine + weight * relative), rel=1e-5)


def test_padding_that_is_nan_is_no_part_of_an_embedding() -> None:
    hidden, wanted, mask = torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    objective, batch = EmbeddingObjective(), {"attention_mask": mask}
    losses = []
    for value in (0.0, torch.nan):
        hidden[1, 2:] = value
        losses.append(float(objective.loss(hidden, objective.target(wanted, batch), batch)))
    assert losses[0] == losses[1]


def test_fisher_losses_of_embeddings_have_the_second_moment_of_the_jacobian() -> None:
    """Over many draws E[g gᵀ] of the gradient by the embedding's input is JᵀJ, here by torch's own Jacobian."""
    states, objective = torch.randn(1, 2, 3, dtype=torch.float64), EmbeddingObjective()

    def pooled(x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(x.mean(1), dim=-1).flatten()

    jacobian = torch.autograd.functional.jacobian(pooled, states).flatten(1)
    total = torch.zeros(6, 6, dtype=torch.float64)
    for _ in range(4000):
        x = states.clone().requires_grad_()
        objective.fisher_loss(x, x).backward()
        total += x.grad.flatten().outer(x.grad.flatten())
    torch.testing.assert_close(total / 4000, jacobian.T @ jacobian, rtol=0.2, atol=0.02)


def top_k_divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float, count: int) -> torch.Tensor:
    """The plain formula in float64: KL between the teacher's likeliest classes with all others as one."""
    q, p = (student.double() / temperature).softmax(-1), (teacher.double() / temperature).softmax(-1)
    total = q.new_zeros(())
    for row_q, row_p in zip(q, p, strict=True):
        kept = row_p.argsort(descending=True)[:count]
        others = torch.ones(len(row_p), dtype=torch.bool)
        others[kept] = False
        total = total + (row_p[kept] * (row_p[kept] / row_q[kept]).log()).sum()
        if others.any():
            total = total + row_p[others].sum() * (row_p[others].sum() / row_q[others].sum()).log()
    return temperature**2 * total / len(q)


@pytest.mark.parametrize("count", [1, 4, 10, 11, 50])
@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, None), (2.5, 3)])
def test_likeliest_classes_are_told_apart_and_the_rest_is_one(count: int, temperature: float, chunk) -> None:
    student, teacher = (3 * torch.randn(2, 5, 11)).requires_grad_(), 3 * torch.randn(2, 5, 11)
    batch = {"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])}
    rows = batch["attention_mask"].bool()
    objective, full = LogitObjective(temperature, chunk, count), LogitObjective(temperature, chunk)
    target = objective.target(teacher, batch)
    assert target.shape == (7, 2 * min(count, 11) + 1)
    loss = objective.loss(student, target, batch)
    (loss * 3).backward()
    other = student.detach().double().requires_grad_()
    expected = top_k_divergence(other[rows], teacher[rows], temperature, count)
    (expected * 3).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(student.grad.double(), other.grad, rtol=1e-4, atol=1e-6)
    whole = float(full.loss(student.detach(), full.target(teacher, batch), batch))
    assert 0 <= float(loss.detach()) <= whole * (1 + 1e-6)
    if count >= 11:
        assert float(loss.detach()) == pytest.approx(whole, rel=1e-5)


def test_likeliest_classes_bear_a_certain_teacher() -> None:
    """What is left over has no mass in float32 there, and a student that gives it some loses nothing by it."""
    teacher = torch.tensor([[300.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    student = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-400.0, 1.0, 2.0, 3.0]], requires_grad=True)
    objective = LogitObjective(top_k=1)
    loss = objective.loss(student, objective.target(teacher, teacher), student)
    loss.backward()
    other = student.detach().double().requires_grad_()
    expected = top_k_divergence(other, teacher, 1.0, 1)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad.double(), other.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(FlexrankError, match="top_k is 0; it must be at least 1"):
        LogitObjective(top_k=0)


def test_bfloat16_logits_get_bfloat16_gradients_and_chunks_change_nothing_but_rounding() -> None:
    teacher, student = torch.randn(300, 2**10).bfloat16(), torch.randn(300, 2**10).bfloat16().requires_grad_()
    results = []
    for chunk in (None, 1000):
        objective = LogitObjective(chunk=chunk)
        loss = objective.loss(student, objective.target(teacher, teacher), student)
        (gradient,) = torch.autograd.grad(loss, student)
        results.append((loss.detach(), gradient))
    assert results[0][1].dtype == torch.bfloat16 and results[0][0].dtype == torch.float32
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)


def test_a_divergence_goes_back_once() -> None:
    student, teacher = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    loss = LogitObjective().loss(student, teacher, student)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the gradient of this divergence was already taken"):
        loss.backward()


def test_divergence_of_equal_logits_is_zero_and_classification_needs_no_mask() -> None:
    logits, objective = torch.randn(4, 7), LogitObjective()
    near, far = (objective.loss(student, objective.target(logits, logits), logits) for student in (logits, -logits))
    assert float(near) == pytest.approx(0, abs=1e-7)
    exact = functional.kl_div((-logits).log_softmax(-1), logits.log_softmax(-1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(far, exact)


@pytest.mark.parametrize("top_k", [None, 3])
def test_last_hidden_states_of_real_tokens_are_followed(top_k: int | None) -> None:
    """By hand: the divergence as it is without them, and 4 times their relative squared error."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch = {"attention_mask": mask}
    states, logits = torch.randn(2, 2, 3, 5), torch.randn(2, 2, 3, 7)
    teacher, student = (
        SimpleNamespace(logits=logits[i], hidden_states=(torch.randn(2, 3, 5), states[i])) for i in range(2)
    )
    student.hidden_states[1].requires_grad_()
    plain, objective = LogitObjective(top_k=top_k), LogitObjective(top_k=top_k, hidden_weight=4.0)
    target = objective.target(teacher, batch)
    loss = objective.loss(student, target, batch)
    error = (states[1] - states[0])[mask.bool()].square().sum() / states[0][mask.bool()].square().sum()
    torch.testing.assert_close(loss, plain.loss(student, plain.target(teacher, batch), batch) + 4 * error)
    assert len(target) == 4 and not target.requires_grad
    (gradient,) = torch.autograd.grad(loss, student.hidden_states[1])
    assert gradient[0].abs().min() > 0 and not gradient[1, 1:].any()
    decoder = SimpleNamespace(logits=logits[0], decoder_hidden_states=teacher.hidden_states)
    assert torch.equal(objective.target(decoder, batch), target)
    with pytest.raises(FlexrankError, match="hidden_weight needs hidden states: set config.output_hidden_states"):
        objective.target(SimpleNamespace(logits=logits[0], hidden_states=None), batch)


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


def test_embeddings_that_the_model_pools_and_features_are_compared_as_they_are() -> None:
    a, b = torch.randn(5, 8), torch.randn(5, 8)
    cosine, relative = (one.loss(a, one.target(b, b), b) for one in (EmbeddingObjective(), FeatureObjective()))
    torch.testing.assert_close(cosine, (1 - functional.cosine_similarity(a, b)).mean())
    torch.testing.assert_close(relative, (a - b).square().sum() / b.square().sum())


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


@pytest.mark.parametrize("objective", [LogitObjective(), EmbeddingObjective(), FeatureObjective()])
def test_fisher_losses_leave_padding_out(objective: FisherObjective) -> None:
    hidden, mask = torch.randn(2, 5, 3, requires_grad=True), torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    (gradient,) = torch.autograd.grad(objective.fisher_loss(hidden, {"attention_mask": mask}), hidden)
    assert ((gradient != 0).all(-1) == mask.bool()).all() and not gradient[1, 3:].any()


def test_a_mask_of_another_length_than_features_is_not_theirs() -> None:
    """As of sounds, whose mask has the waves' length; with their own length it leaves padding out."""
    hidden, target = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    mask, objective = torch.ones(2, 5, dtype=torch.long), FeatureObjective()
    mask[1, 3:] = 0
    whole = (hidden - target).square().sum() / target.square().sum()
    torch.testing.assert_close(objective.loss(hidden, target, {"attention_mask": torch.ones(2, 40)}), whole)
    errors, squares = (hidden - target).square().sum(-1) * mask, target.square().sum(-1) * mask
    torch.testing.assert_close(objective.loss(hidden, target, {"attention_mask": mask}), errors.sum() / squares.sum())


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"chunk": 0}])
def test_wrong_settings_of_an_objective_are_one_line(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(FlexrankError, match=f"{name} is {value}; it must be"):
        LogitObjective(**wrong)


def test_tasks_have_objectives() -> None:
    assert objective_for("language", temperature=2.0) == LogitObjective(2.0)
    assert objective_for("language", top_k=8, hidden_weight=4.0) == LogitObjective(top_k=8, hidden_weight=4.0)
    assert objective_for("classification", hidden_weight=4.0) == LogitObjective()
    assert objective_for("embedding", hidden_weight=0.5) == EmbeddingObjective(0.5)
    with pytest.raises(FlexrankError, match="task 'speech' is unknown"):
        objective_for("speech")


@pytest.mark.parametrize(
    "objective",
    [LogitObjective(2.0, hidden_weight=3.0), LogitObjective(top_k=2), EmbeddingObjective(4.0), FeatureObjective()],
)
def test_the_terms_of_parts_of_a_batch_are_those_of_the_whole(objective) -> None:
    """Parts of two rows and of one, of which each has other padding, and one that has nothing else."""
    masks = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    student, teacher = torch.randn(4, 4, 6), torch.randn(4, 4, 6)

    def terms(rows: slice) -> list[list[float]]:
        batch = {"attention_mask": masks[rows]}
        outputs = [
            SimpleNamespace(logits=part, hidden_states=[part + 1]) if isinstance(objective, LogitObjective) else part
            for part in (student[rows], teacher[rows])
        ]
        target = objective.target(outputs[1], batch)
        return [[float(part) for part in term] for term in objective.terms(outputs[0], target, batch)]

    parts = [terms(rows) for rows in (slice(0, 2), slice(2, 3), slice(3, 4))]
    for number, (top, bottom) in enumerate(terms(slice(0, 4))):
        assert sum(part[number][0] for part in parts) == pytest.approx(top, rel=1e-5)
        assert sum(part[number][1] for part in parts) == pytest.approx(bottom, rel=1e-5)


def test_logits_of_maps_need_an_objective_of_ones_own() -> None:
    maps = torch.randn(2, 7, 4, 4)
    with pytest.raises(
        FlexrankError, match=r"logits have shape \(2, 7, 4, 4\); they are \(B, T, V\) or \(B, classes\)"
    ):
        LogitObjective().target(maps, {})


@pytest.mark.parametrize(
    "objective", [EmbeddingObjective(), EmbeddingObjective(1.0), FeatureObjective(), LogitObjective()]
)
def test_padding_alone_is_no_row(objective: Any) -> None:
    """A batch of it is refused; a row of it changes nothing."""
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    draw = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(2, 3, 4, generator=draw) for _ in range(2))
    batch = {"attention_mask": mask}
    alone = {"attention_mask": mask[:1]}
    whole = objective.loss(student, objective.target(teacher, batch), batch)
    first = objective.loss(student[:1], objective.target(teacher[:1], alone), alone)
    assert float(whole) == pytest.approx(float(first), rel=1e-6)
    none = {"attention_mask": torch.zeros(2, 3, dtype=torch.long)}
    with pytest.raises(FlexrankError, match="a batch has no real token"):
        objective.loss(student, objective.target(teacher, none), none)


def test_rows_of_padding_alone_have_no_weight_in_an_evaluation() -> None:
    """Oracle: the same batches without them."""
    teacher, student, ids = build("bert"), build("bert", seed=1), torch.arange(3, 15).view(3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    first, second = {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids + 20}
    values = []
    for batches in ([first, second], [{key: value[:2] for key, value in first.items()}, second]):
        values.append(distillation_evaluator(teacher, batches, EmbeddingObjective())(student))
    assert values[0] == pytest.approx(values[1], rel=1e-6)
