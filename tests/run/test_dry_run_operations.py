"""The dry run's operations against those that torch counts, and what is counted on which device."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from flexrank.calibrate import collect_moments
from flexrank.data.batches import call_model, output_tensor
from flexrank.distill import distill_, trained
from flexrank.distill.objectives import LogitObjective
from flexrank.files import write_json
from flexrank.nn import linalg
from flexrank.nn.elastic import NestedConv2d, NestedLinear
from flexrank.nn.matrix import ConvGeometry
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_matrices, full_profile, nested_layers, uniform_profile, use_profile
from flexrank.probe import probe_sensitivity
from flexrank.profiles.costs import rank_levels
from flexrank.run.dry_run import dry_run, operations
from flexrank.run.dry_run.architecture import build_architecture
from flexrank.run.dry_run.devices import GPUS
from tiny import nest
from tiny_dry_runs import BATCH, LENGTH, Build, batch_of, config_of, flops, real, uniform


@pytest.mark.parametrize("build", [tiny.llama_untied, tiny.gpt2])
@pytest.mark.parametrize("room", [2**32, 15000, 0], ids=["matrices kept", "some kept", "none kept"])
def test_a_probe_takes_the_operations_counted(
    build: Build, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, to the last one, for a probe that replays nothing."""
    monkeypatch.setattr(operations, "MATRIX_BYTES", room)
    config = config_of(build, tmp_path, probe={"levels": 4}, data={"probe": BATCH})
    expected, student, batch = dry_run(config)["operations"]["probe"], nest(real(build)), batch_of(build)

    def evaluate(model: Any) -> float:
        return float(call_model(model, batch).logits.sum() * 0)

    def plain_probe() -> None:
        ranks = {name: rank_levels(layer.matrix_shape, 4) for name, layer in nested_layers(student).items()}
        with use_profile(student, full_profile(student)), full_matrices(student, room):
            evaluate(student)
            for layer, levels in ranks.items():
                for rank in levels[:-1]:
                    with use_profile(student, full_profile(student) | {layer: rank}):
                        evaluate(student)

    with torch.no_grad():
        teacher = flops(lambda: call_model(real(build), batch))
        replayed = flops(lambda: probe_sensitivity(student, evaluate, 4, matrix_bytes=room))
        assert replayed < flops(plain_probe) == expected - teacher


@pytest.mark.parametrize("build", tiny.TRANSFORMERS.values())
def test_a_forward_pass_takes_the_operations_that_torch_counts(build: Build, tmp_path: Path) -> None:
    architecture, model = build_architecture(config_of(build, tmp_path)), real(build)
    with torch.no_grad():
        assert operations.forward(architecture, BATCH) == flops(lambda: call_model(model, batch_of(build)))


@pytest.mark.parametrize("build", tiny.TRANSFORMERS.values())
@pytest.mark.parametrize("budget", [0.9, 0.4])
def test_a_training_pass_takes_the_operations_that_torch_counts(build: Build, budget: float, tmp_path: Path) -> None:
    """All to the last one. Two layers are left out: an encoder of images reads its patch embedding's weight to learn
    the dtype, which makes the matrix once or twice more, and BERT's pooler has no part in the loss."""
    left_out = ["patch_embeddings"] if build in tiny.VISION else ["pooler"] if build is tiny.bert else []
    config = config_of(build, tmp_path, layers={"exclude": left_out})
    architecture, model = build_architecture(config), real(build)
    student = nest(real(build), exclude=left_out)
    ranks = uniform_profile(student, budget)
    trainable = trained.trainable_parameters(student, factors_only=True)
    with trained.training(student, model, trainable), use_profile(student, ranks):
        with FlopCounterMode(display=False) as counter:
            output = output_tensor(call_model(student, batch_of(build)))
            assert operations.forward(architecture, BATCH, ranks) == counter.get_total_flops()
            output.sum().backward()
    unused = 2 * BATCH * math.prod(architecture.matrices["pooler.dense"]) if build is tiny.bert else 0
    total = operations.forward(architecture, BATCH, ranks) + operations.backward(architecture, BATCH, ranks)
    assert total - unused == counter.get_total_flops()


@pytest.mark.parametrize("build", tiny.VISION)
def test_with_the_patch_embedding_the_difference_is_within_the_matrix_made_twice(build: Build, tmp_path: Path) -> None:
    architecture, student = build_architecture(config_of(build, tmp_path)), nest(real(build))
    ranks = uniform_profile(student, 0.9)
    with torch.no_grad(), use_profile(student, ranks):
        counted = flops(lambda: call_model(student, batch_of(build)))
    (name,) = (name for name in ranks if "patch" in name)
    made = 2 * ranks[name] * math.prod(architecture.shapes[name])
    assert counted - operations.forward(architecture, BATCH, ranks) in (made, 2 * made)


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize(("rows", "rank"), [(3, 8), (64, 2), (64, 8)])
def test_an_elastic_layer_takes_the_cheaper_route_both_ways(rows: int, rank: int, needs_gradient: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    geometry = ConvGeometry(3, (2, 2), (2, 2), (0, 0), (1, 1))
    u, v = torch.randn(8, 10, generator=generator), torch.randn(8, 12, generator=generator)
    inputs = {NestedLinear: torch.randn(rows, 12), NestedConv2d: torch.randn(1, 3, 2, 2 * rows)}
    for layer in (NestedLinear(u, v), NestedConv2d(u, v, None, geometry)):
        layer.rank = rank
        with FlopCounterMode(display=False) as counter:
            output = layer(inputs[type(layer)].requires_grad_(needs_gradient))
            forward = operations.elastic_forward((10, 12), rank, rows)
            assert counter.get_total_flops() == forward
            output.sum().backward()
        backward = operations.elastic_backward((10, 12), rank, rows, needs_gradient)
        assert counter.get_total_flops() == forward + backward


@pytest.mark.parametrize("build", [tiny.llama_tied, tiny.vit])
@pytest.mark.parametrize("method", ["datasvd", "paper", "fisher"])
def test_calibration_takes_the_operations_that_torch_counts(build: Build, method: str, tmp_path: Path) -> None:
    config = config_of(build, tmp_path, decomposition={"method": method})
    architecture, model = build_architecture(config), real(build)
    loss = LogitObjective().fisher_loss if method == "fisher" else None
    side: Any = "input" if method == "paper" else "smaller"
    batches, layers = [batch_of(build)] * 2, select_layers(model)
    counted = flops(lambda: collect_moments(model, batches, layers, side=side, gradient_loss=loss))
    if loss is not None:  # block by block, backwards, each runs once more
        counted += flops(lambda: [call_model(model, batch) for batch in batches])
    assert operations.calibration(architecture, config) == counted


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (9, 9)])
def test_a_factorisation_is_its_products_and_textbook_terms(shape: tuple[int, int]) -> None:
    m, n = shape
    k, longer = min(shape), max(shape)
    weight, rows = torch.randn(m, n, dtype=torch.float64), torch.randn(40, n, dtype=torch.float64)
    moment, output = rows.T @ rows, weight @ rows.T @ rows @ weight.T
    gradient = torch.eye(m, dtype=torch.float64)
    triangle = n**3 // 3 + n**3 if m > n else 0
    svd, joint, definite = 14 * longer * k**2 + 8 * k**3, 9 * k**3 + triangle, m**3 // 3 + m**2 * k
    cases: list[tuple[str, bool, int, Callable[[], Any]]] = [
        ("svd", False, svd, lambda: linalg.plain_svd(weight)),
        ("paper", False, 9 * n**3 + svd, lambda: linalg.whitened_svd(weight, moment)),
        ("datasvd", False, joint, lambda: linalg.data_svd(weight, input_moment=moment)),
        ("fisher", False, joint + definite,
         lambda: linalg.data_svd(weight, input_moment=moment, gradient_moment=gradient)),
    ]  # fmt: skip
    if m <= n:
        of_output: dict[str, Any] = {"output_moment": output, "mean_square": 1.0}
        cases += [
            ("datasvd", True, joint, lambda: linalg.data_svd(weight, **of_output)),
            ("fisher", True, joint + definite, lambda: linalg.data_svd(weight, gradient_moment=gradient, **of_output)),
        ]
    for method, from_output, terms, factorise in cases:
        assert operations.factorisation(shape, method, from_output) == flops(factorise) + terms


def test_consolidation_takes_the_operations_that_torch_counts(tmp_path: Path) -> None:
    """One budget alone, and two, each of which is drawn once; else the larger one twice as often, as by `distill_`.

    At budget 1 beside another one matrices run, which are made before the first step, and are not trained.
    """
    build, steps = tiny.llama_tied, {"steps": 2, "accumulation": 2, "teacher_cache": 0}
    model, batches = real(build), [batch_of(build)] * 2
    for budgets in ([0.9], [0.4], [1.0, 0.4], [0.9, 0.4]):
        weights = [1.0] * len(budgets)
        more: Any = {"allocation": {"budgets": budgets}, "distillation": {"weights": weights}}
        config, student = config_of(build, tmp_path, **more), nest(real(build))
        chain = [uniform(student, budget)[0] for budget in reversed(budgets)]
        counted = flops(functools.partial(distill_, student, model, batches, chain, weights=weights, **steps))
        made = sum(
            2 * min(layer.matrix_shape) * math.prod(layer.matrix_shape) for layer in nested_layers(student).values()
        )
        assert dry_run(config)["operations"]["consolidation"] == counted - made * (budgets == [1.0, 0.4])
    settings: list[dict[str, Any]] = [{"weights": [3.0, 1.0]}, {"weights": [2.0, 1.0]}, {}]
    costs = [dry_run(config_of(build, tmp_path, distillation=one))["operations"]["consolidation"] for one in settings]
    assert costs[0] > costs[1] == costs[2] and counted < costs[2] < costs[0]
    whole: list[dict[str, Any]] = [{}, {"weights": [1e-9, 1.0]}]  # budget 1 is never drawn
    costs = [
        dry_run(config_of(build, tmp_path, allocation={"budgets": [1.0, 0.4]}, distillation=one))["operations"]
        for one in whole
    ]
    assert costs[0]["consolidation"] == pytest.approx(costs[1]["consolidation"], rel=1e-6)


@pytest.mark.parametrize("method", ["balanced", "paper"])
def test_blocks_that_run_again_take_the_operations_that_torch_counts(method: Any, tmp_path: Path) -> None:
    """All but each block's last product, whose output nothing needs to go back: torch ends the block before it."""
    build, budgets, keys = tiny.llama_tied, [0.9, 0.4], {"gradient_checkpointing": True, "method": method}
    more: Any = {"allocation": {"budgets": budgets}, "distillation": keys | {"weights": [1.0, 1.0]}}
    config, student = config_of(build, tmp_path, **more), nest(real(build))
    chain, batches = [uniform(student, budget)[0] for budget in reversed(budgets)], [batch_of(build)] * 2
    counted = flops(
        lambda: distill_(
            student, real(build), batches, chain, weights=[1.0, 1.0], steps=2, accumulation=2, teacher_cache=0, **keys
        )
    )
    last = sum(
        2 * 2 * BATCH * LENGTH * rank * layer.matrix_shape[0]
        for profile in chain
        for name, rank in profile.items()
        if name.endswith("down_proj") and (layer := nested_layers(student)[name])
    )
    assert dry_run(config)["operations"]["consolidation"] == counted + last


@pytest.mark.parametrize(("width", "inner"), [(16, 144), (64, 48), (32, 64), (32, 48)])
def test_the_chain_of_another_model_is_not_counted_with(width: int, inner: int, tmp_path: Path) -> None:
    """Layers of all these models have the same names. Oracle: the plan of a run without a chain."""
    sizes = tiny.DECODER | {"hidden_size": width, "intermediate_size": inner}
    other = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    chain = tiny.chain_of(tiny.nest(other), (0.4, 0.8, 1.0))
    more = {"output": str(tmp_path / "run"), "allocation": {"budgets": list(chain.budgets)}}
    config = config_of(tiny.llama_tied, tmp_path, **more)
    without = dry_run(config)
    write_json(tmp_path / "run" / "chain.json", chain.to_json())
    assert (dry_run(config) == without) == ((width, inner) != (32, 48))


@pytest.mark.parametrize(
    ("device", "gpu", "is_here", "is_counted"),
    [
        ("cpu", None, True, True),
        ("auto", None, False, True),
        ("auto", None, True, False),
        ("auto", "h100", False, False),
        ("cuda", None, False, False),
    ],
)
def test_the_buffers_of_a_host_are_counted_where_it_computes(
    device: str, gpu: str | None, is_here: bool, is_counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_here)
    counted = dry_run(config_of(tiny.llama_tied, tmp_path, device=device), device=GPUS[gpu] if gpu else None)
    assert ("buffers" in counted["memory"]["calibration"]) == is_counted


def test_checkpoints_are_counted_whatever_takes_most_memory(tmp_path: Path) -> None:
    """With large batches outside training the check of losses takes more than a step, which has what is saved."""
    config = config_of(tiny.llama_tied, tmp_path, distillation={"steps": 3, "checkpoint_every": 2})
    large = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": 5000})})
    held = [dry_run(one)["memory"]["consolidation"] for one in (config, large)]
    assert ["gradients" in one for one in held] == [True, False] and held[1]["all"] > held[0]["all"]
    works = [dry_run(one, device=GPUS["h100"])["plan"]["stages"]["consolidation"]["work"] for one in (config, large)]
    assert works[0]["disk_bytes"] == works[1]["disk_bytes"]
