"""Every figure of a dry run against real models that are decomposed, run, trained and deployed."""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny
from flexrank.calibrate import collect_moments, find_groups
from flexrank.data.batches import call_model, output_tensor
from flexrank.deployment import deploy, deployed_parameters_of
from flexrank.distill import distill_, step
from flexrank.distill.objectives import EmbeddingObjective, LogitObjective, default_objective
from flexrank.hf.meta import meta_model
from flexrank.hf.models import save_config
from flexrank.nn import linalg
from flexrank.nn.elastic import NestedConv2d, NestedLinear
from flexrank.nn.matrix import ConvGeometry
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_matrices, full_profile, nested_layers, uniform_profile, use_profile
from flexrank.probe import probe_sensitivity
from flexrank.profiles import SlackTable
from flexrank.profiles.costs import SLACK_SHARE, rank_levels
from flexrank.run.dry_run import dry_run, operations
from flexrank.run.dry_run.architecture import build_architecture
from flexrank.run.dry_run.memory import moment_bytes
from tiny import nest
from tiny_dry_runs import BATCH, LENGTH, Build, config_of


def batch_of(build: Build, rows: int = BATCH) -> Any:
    """A batch without padding."""
    generator = torch.Generator().manual_seed(0)
    if build in tiny.VISION:
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(3, tiny.VOCABULARY, (rows, LENGTH), generator=generator)}


def real(build: Build) -> Any:
    """The model on the CPU, with attention as plain products, which the counter sees."""
    torch.manual_seed(0)
    model = build()
    model.set_attn_implementation("eager")
    return model


def flops(run: Callable[[], Any]) -> int:
    """The operations that torch counts."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(one): one for one in tensors}.values())


@pytest.mark.parametrize("build", tiny.TRANSFORMERS.values())
def test_parameters_and_layers_are_those_of_the_real_model(build: Build, tmp_path: Path) -> None:
    result, model = dry_run(config_of(build, tmp_path)), real(build)
    student = nest(real(build))
    layers, sizes = nested_layers(student), result["parameters"]
    assert sizes["model"] == model.num_parameters()
    assert sizes["elastic_model"] == sum(p.numel() for p in student.parameters())
    assert sizes["factors"] == sum(layer.u.numel() + layer.v.numel() for layer in layers.values())
    assert sizes["trained"] == sum(p.numel() for p in step.trainable_parameters(student, factors_only=True).values())
    assert sizes["layers"] == sum(row["parameters"] for row in result["layers"])
    assert sizes["model"] == sum(row["parameters"] for row in (*result["layers"], *result["dense"]))
    counts: Counter[tuple[int, ...]] = Counter()
    for row in result["layers"]:
        counts[tuple(row["shape"])] += row["layers"]
    assert counts == Counter(layer.matrix_shape for layer in layers.values())
    assert result["probe"]["layers"] == len(layers) == sum(row["layers"] for row in result["layers"])


def test_what_stays_dense_has_its_reason_and_counts_once(tmp_path: Path) -> None:
    config = config_of(tiny.llama_tied, tmp_path, layers={"exclude": ["down_proj"]})
    rows = {row["kind"]: (row["reason"], row["modules"], row["parameters"]) for row in dry_run(config)["dense"]}
    model = real(tiny.llama_tied)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert rows == {
        "model.embed_tokens": ("embedding", 1, 64 * 32),
        "mlp.down_proj": ("excluded", 2, 2 * 32 * 48),
        "lm_head": ("weight tied to model.embed_tokens", 1, 0),
        "all else": ("norms, biases and tokens of its own", 0, norms),
    }


@pytest.mark.parametrize("build", tiny.TRANSFORMERS.values())
@pytest.mark.parametrize("method", ["datasvd", "paper", "fisher", "curvature"])
def test_moments_take_the_bytes_that_calibration_allocates(build: Build, method: str, tmp_path: Path) -> None:
    keys = {"probe": {"method": method}} if method == "curvature" else {"decomposition": {"method": method}}
    config = config_of(build, tmp_path, **keys)
    architecture = build_architecture(config)
    model = real(build)
    objective = EmbeddingObjective() if build is tiny.bert else default_objective(call_model(model, batch_of(build)))
    loss = objective.fisher_loss if method in ("fisher", "curvature") else None
    side: Any = "input" if method in ("paper", "curvature") else "smaller"
    moments = collect_moments(model, [batch_of(build)], select_layers(model), side=side, gradient_loss=loss)
    tensors = [entry.moment for entry in moments.values()]
    tensors += [entry.gradient_moment for entry in moments.values() if entry.gradient_moment is not None]
    assert sum(moment_bytes(architecture, config).values()) == bytes_of(tensors)
    groups = find_groups(lambda: call_model(model, batch_of(build)), select_layers(model))
    assert sorted(architecture.groups) == sorted(map(tuple, groups))


def test_memory_is_what_real_training_holds(tmp_path: Path) -> None:
    memory = dry_run(config_of(tiny.llama_tied, tmp_path))["memory"]
    model, student = real(tiny.llama_tied), nest(real(tiny.llama_tied))
    tensors = [bytes_of([*one.parameters(), *one.buffers()]) for one in (model, student)]
    for layer in nested_layers(student).values():
        layer.set_sizes_([2, 9])  # two budgets
    whole = bytes_of([*student.parameters(), *student.buffers()])
    assert len(block := model.model.layers[0].state_dict()) == 9  # both blocks are alike
    at_once = tensors[0] - bytes_of(block.values())
    assert memory["calibration"]["student"] == memory["decomposition"]["student"] == at_once
    for stage, student_bytes in {"probe": tensors[1], "consolidation": whole}.items():
        assert (memory[stage]["teacher"], memory[stage]["student"]) == (tensors[0], student_bytes)
    trainable = step.trainable_parameters(student, factors_only=True)
    optimizer = step.make_optimizer(student, trainable, 1e-3, 0.0)
    batch = batch_of(tiny.llama_tied)
    with step.training(student, model, trainable):
        output = call_model(student, batch).logits
        output.square().sum().backward()
        gradients = bytes_of([p.grad for p in trainable.values()])
        optimizer.step()
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert (memory["consolidation"]["gradients"], memory["consolidation"]["optimizer"]) == (gradients, bytes_of(states))
    one = bytes_of([output])
    assert [memory[stage]["outputs"] for stage in ("probe", "consolidation")] == [2 * one, 3 * one]
    kept = [LogitObjective().target(call_model(model, batch_of(tiny.llama_tied, rows)), {}) for rows in (3, 2)]
    assert memory["probe"]["targets"] == bytes_of(kept)
    assert all(parts["all"] == sum(parts.values()) - parts["all"] for parts in memory.values())


def test_the_teacher_keeps_the_dtype_of_its_files(tmp_path: Path) -> None:
    """In bfloat16 it takes half as much, and so do its outputs; the elastic model stays in float32."""
    single, config = dry_run(config_of(tiny.llama_tied, tmp_path))["memory"], config_of(tiny.llama_tied, tmp_path)
    path = Path(config.architecture or "")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    half = dry_run(config)["memory"]
    model = real(tiny.llama_tied)
    rest = bytes_of(model.buffers())
    for stage in ("probe", "consolidation"):
        assert half[stage]["teacher"] - rest == (single[stage]["teacher"] - rest) / 2 > 0
        assert half[stage]["student"] == single[stage]["student"]
    assert half["probe"]["targets"] == single["probe"]["targets"] / 2
    assert half["probe"]["outputs"] == single["probe"]["outputs"] * 3 / 4
    assert half["decomposition"] == single["decomposition"]


def test_curvature_takes_no_probe(tmp_path: Path) -> None:
    result = dry_run(config_of(tiny.llama_tied, tmp_path, probe={"method": "curvature"}))
    assert result["memory"]["probe"]["all"] == result["operations"]["probe"] == result["probe"]["evaluations"] == 0


def uniform(student: Any, budget: float, slack_share: float = SLACK_SHARE) -> tuple[dict[str, int], dict[str, int]]:
    """The largest rank of each layer within the budget, and its slack, by trying all ranks."""
    ranks, slack = {}, {}
    for name, layer in nested_layers(student).items():
        m, n = layer.matrix_shape
        slacks = {rank: math.ceil(slack_share * rank) for rank in range(1, min(m, n) + 1)}
        fitting = [rank for rank, p in slacks.items() if min(m * n, rank * (m + n - rank + p)) <= budget * m * n]
        ranks[name] = max(fitting)
        slack[name] = slacks[ranks[name]]
    return ranks, slack


@pytest.mark.parametrize(
    ("build", "method"),
    [(tiny.gpt2, "joint"), (tiny.llama_tied, "joint"), (tiny.dinov3, "joint"), (tiny.gpt2, "paper")],
)
def test_sizes_by_budget_are_those_of_deployed_models(build: Build, method: str, tmp_path: Path) -> None:
    """With the slack that allocation expects: a tenth of the rank, and none for the paper's algorithm."""
    result = dry_run(config_of(build, tmp_path, deployment={"dtype": "bfloat16"}, allocation={"method": method}))
    student = nest(real(build))
    dense = sum(m * n for m, n in (layer.matrix_shape for layer in nested_layers(student).values()))
    for row in result["budgets"]:
        profile, slack = uniform(student, row["budget"], SLACK_SHARE if method == "joint" else 0.0)
        table = SlackTable("bfloat16", {name: {profile[name]: columns} for name, columns in slack.items()})
        small = deploy(student, profile, dtype=torch.bfloat16, slack=table)
        layers = deployed_parameters_of(small, profile)
        assert row["params_layers"] == layers and row["relative_size"] == layers / dense <= row["budget"]
        assert row["params_model"] == sum(p.numel() for p in small.parameters())
        assert row["bytes"] == bytes_of(small.state_dict(keep_vars=True).values())
        assert row["mean_rank"] == sum(profile.values()) / len(profile)


@pytest.mark.parametrize("spacing", ["blocks", "parameters", "ranks"])
def test_candidates_and_evaluations_are_those_of_a_probe(spacing: str, tmp_path: Path) -> None:
    probe = dry_run(config_of(tiny.llama_untied, tmp_path, probe={"levels": 6, "spacing": spacing}))["probe"]
    table = probe_sensitivity(nest(real(tiny.llama_untied)), lambda _: 0.0, 6, spacing=spacing)  # type: ignore[arg-type]
    assert probe["candidates"] == sum(map(len, table.ranks.values()))
    assert probe["evaluations"] == 1 + sum(len(ranks) - 1 for ranks in table.ranks.values())
    assert (probe["layers"], probe["levels"]) == (len(table.ranks), 6)


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
    trainable = step.trainable_parameters(student, factors_only=True)
    with step.training(student, model, trainable), use_profile(student, ranks):
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
    svd, joint = 14 * longer * k**2 + 8 * k**3, 9 * k**3 + triangle
    cases: list[tuple[str, bool, int, Callable[[], Any]]] = [
        ("svd", False, svd, lambda: linalg.plain_svd(weight)),
        ("paper", False, 9 * n**3 + svd, lambda: linalg.whitened_svd(weight, moment)),
        ("datasvd", False, joint, lambda: linalg.data_svd(weight, input_moment=moment)),
        ("fisher", False, joint + 9 * m**3,
         lambda: linalg.data_svd(weight, input_moment=moment, gradient_moment=gradient)),
    ]  # fmt: skip
    if m <= n:
        of_output: dict[str, Any] = {"output_moment": output, "mean_square": 1.0}
        cases += [
            ("datasvd", True, joint, lambda: linalg.data_svd(weight, **of_output)),
            ("fisher", True, joint + 9 * m**3, lambda: linalg.data_svd(weight, gradient_moment=gradient, **of_output)),
        ]
    for method, from_output, terms, factorise in cases:
        assert operations.factorisation(shape, method, from_output) == flops(factorise) + terms


def test_consolidation_takes_the_operations_that_torch_counts(tmp_path: Path) -> None:
    """One budget alone, and two, each of which is drawn once; else the larger one twice as often, as by `distill_`."""
    build, steps = tiny.llama_tied, {"steps": 2, "accumulation": 2, "teacher_cache": 0}
    model, batches = real(build), [batch_of(build)] * 2
    for budgets in ([0.9], [0.4], [0.9, 0.4]):
        weights = [1.0] * len(budgets)
        more: Any = {"allocation": {"budgets": budgets}, "distillation": {"weights": weights}}
        config, student = config_of(build, tmp_path, **more), nest(real(build))
        chain = [uniform(student, budget)[0] for budget in reversed(budgets)]
        counted = flops(functools.partial(distill_, student, model, batches, chain, weights=weights, **steps))
        assert dry_run(config)["operations"]["consolidation"] == counted
    settings: list[dict[str, Any]] = [{"weights": [3.0, 1.0]}, {"weights": [2.0, 1.0]}, {}, {"method": "paper"}]
    costs = [dry_run(config_of(build, tmp_path, distillation=one))["operations"]["consolidation"] for one in settings]
    assert costs[0] > costs[1] == costs[2] and counted < costs[2] < costs[0]
    assert costs[3] > counted  # norms are trained too
    whole: list[dict[str, Any]] = [{}, {"weights": [1.0, 2.0]}]  # budget 1 is not favoured
    costs = [
        dry_run(config_of(build, tmp_path, allocation={"budgets": [1.0, 0.4]}, distillation=one))["operations"]
        for one in whole
    ]
    assert costs[0] == costs[1]


def test_tokens_hours_and_stages_add_up(tmp_path: Path) -> None:
    result = dry_run(config_of(tiny.vit, tmp_path), tflops=2.0)
    assert result["sample_tokens"] == 17 and result["tokens"] == 2 * 2 * BATCH * 17  # 16 patches and the class token
    assert dry_run(config_of(tiny.llama_untied, tmp_path))["tokens"] == 2 * 2 * BATCH * LENGTH
    stages = {stage: number for stage, number in result["operations"].items() if stage != "all"}
    assert result["operations"]["all"] == sum(stages.values()) and list(stages) == list(result["memory"])
    hours = result["hours"]
    assert hours["decomposition"] is None
    assert hours["all"] == pytest.approx(sum(value for name, value in hours.items() if value and name != "all"))
    assert hours["probe"] == pytest.approx(stages["probe"] / 2e12 / 3600)
    once = operations.forward(build_architecture(config_of(tiny.vit, tmp_path)), 1)
    assert stages["probe"] > result["probe"]["evaluations"] * 5 * once * 0.9


def test_the_meta_model_has_the_buffers_and_ties_of_the_real_one(tmp_path: Path) -> None:
    save_config(tiny.llama_tied(), tmp_path)
    model, wanted = meta_model(tmp_path, "language"), tiny.llama_tied()
    shapes, expected = ({n: value.shape for n, value in one.state_dict().items()} for one in (model, wanted))
    assert shapes == expected
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())) and not model.training
