"""The dry run's layers, sizes and memory against real models."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from flexrank.calibrate import collect_moments, find_groups
from flexrank.data.batches import call_model
from flexrank.deployment import deploy, deployed_parameters_of
from flexrank.distill import trained
from flexrank.distill.objectives import EmbeddingObjective, LogitObjective, default_objective
from flexrank.distill.optimizer import make_optimizer
from flexrank.hf.meta import meta_model
from flexrank.hf.models import hidden_states, save_config
from flexrank.nn.blocks import block_stack
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers, use_profile
from flexrank.probe import probe_sensitivity
from flexrank.profiles import SlackTable
from flexrank.profiles.costs import SLACK_SHARE
from flexrank.run.dry_run import dry_run, operations
from flexrank.run.dry_run.architecture import build_architecture
from flexrank.run.dry_run.memory import count_memory, decomposed_bytes, tensor_bytes, trained_part
from flexrank.run.dry_run.moments import moment_bytes
from tiny import nest
from tiny_dry_runs import BATCH, LENGTH, Build, batch_of, bytes_of, config_of, real, uniform


@pytest.mark.parametrize("build", tiny.TRANSFORMERS.values())
def test_parameters_and_layers_are_those_of_the_real_model(build: Build, tmp_path: Path) -> None:
    result, model = dry_run(config_of(build, tmp_path)), real(build)
    student = nest(real(build))
    layers, sizes = nested_layers(student), result["parameters"]
    assert sizes["model"] == model.num_parameters()
    assert sizes["elastic_model"] == sum(p.numel() for p in student.parameters())
    assert sizes["factors"] == sum(layer.u.numel() + layer.v.numel() for layer in layers.values())
    assert sizes["trained"] == sum(p.numel() for p in trained.trainable_parameters(student, factors_only=True).values())
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


def test_layers_that_read_the_same_tensor_are_one_group(tmp_path: Path) -> None:
    groups = {group for group in build_architecture(config_of(tiny.llama_tied, tmp_path)).groups if ".0." in group[0]}
    parts = {tuple(name.removeprefix("model.layers.0.") for name in group) for group in groups}
    attention = {tuple(f"self_attn.{side}_proj" for side in "qkv"), ("self_attn.o_proj",)}
    assert parts == attention | {("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)}


def test_calibration_takes_moments_or_the_two_outputs_that_are_compared(tmp_path: Path) -> None:
    config = config_of(tiny.llama_tied, tmp_path)
    architecture = build_architecture(config)
    moments = max(moment_bytes(architecture, config).values())
    most = moments // 8  # numbers of one sample's output: two of four bytes each take as much
    for outputs, key, size in ((most - 1, "moments", moments), (most + 1, "outputs", 8 * (most + 1))):
        memory = count_memory(dataclasses.replace(architecture, outputs=outputs), config)["calibration"]
        assert memory[key] == size and memory["all"] == memory["student"] + size


def test_memory_is_what_real_training_holds(tmp_path: Path) -> None:
    """Factors up to the largest rank; what is not trained is the teacher's."""
    memory = dry_run(config_of(tiny.llama_tied, tmp_path))["memory"]
    model, student = real(tiny.llama_tied), nest(real(tiny.llama_tied))
    tensors = [bytes_of([*one.parameters(), *one.buffers()]) for one in (model, student)]
    assert len(block := model.model.layers[0].state_dict()) == 9  # both blocks are alike
    at_once = tensors[0] - bytes_of(block.values())
    assert memory["calibration"]["student"] == memory["decomposition"]["student"] == at_once
    assert (memory["probe"]["teacher"], memory["probe"]["student"]) == tuple(tensors)
    # A layer saves a quarter, or is full, and then the teacher's.
    table = probe_sensitivity(student, lambda _: 0.0, 4)
    profiles = [uniform(student, budget)[0] for budget in (0.9, 0.4)]
    profiles[0] = {name: min(rank, table.ranks[name][-2]) for name, rank in profiles[0].items()}
    for name, layer in nested_layers(student).items():
        layer.set_sizes_([profile[name] for profile in reversed(profiles)])
    batch, held = batch_of(tiny.llama_tied), memory["consolidation"]
    with trained.trimmed_factors(student, profiles):
        trainable = trained.trainable_parameters(student, factors_only=True)
        optimizer = make_optimizer(student, trainable, 1e-3)
        with trained.training(student, model, trainable), use_profile(student, profiles[0]):
            output = call_model(student, batch).logits
            output.square().sum().backward()
            gradients = bytes_of([p.grad for p in trainable.values()])
            optimizer.step()
        assert held["student"] == bytes_of([*trainable.values(), *student.buffers()])
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert (held["gradients"], held["optimizer"], held["teacher"]) == (gradients, bytes_of(states), tensors[0])
    one = bytes_of([output])
    assert [memory[stage]["outputs"] for stage in ("probe", "consolidation", "evaluation")] == [
        2 * one,
        3 * one,
        3 * one,
    ]
    kept = [LogitObjective().target(call_model(model, batch_of(tiny.llama_tied, rows)), {}) for rows in (3, 2)]
    assert memory["probe"]["targets"] == bytes_of(kept)
    assert all(parts["all"] == sum(parts.values()) - parts["all"] for parts in memory.values())


def test_before_consolidation_no_component_above_the_largest_size_is_held(tmp_path: Path) -> None:
    config = config_of(tiny.llama_tied, tmp_path, allocation={"budgets": [0.6, 0.4]})
    student = nest(real(tiny.llama_tied))
    ranks = uniform(student, 0.6)[0]
    for name, layer in nested_layers(student).items():
        layer.u, layer.v = (torch.nn.Parameter(factor[: ranks[name]]) for factor in (layer.u, layer.v))
    assert decomposed_bytes(build_architecture(config), config) == bytes_of([*student.parameters(), *student.buffers()])


def test_gradients_take_the_place_of_activations_in_a_step_of_one_batch(tmp_path: Path) -> None:
    def held(**keys: Any) -> dict[str, int]:
        settings = {"batch_size": 64, **keys}
        return dry_run(config_of(tiny.llama_tied, tmp_path, distillation=settings))["memory"]["consolidation"]

    one, two = held(accumulation=1), held(accumulation=2)
    assert two["activations"] > two["gradients"] == one["gradients"] > 0
    assert one["activations"] == two["activations"] - two["gradients"]
    # A block that runs again has its activations beside all gradients but its own.
    repeated = [held(accumulation=count, gradient_checkpointing=True)["activations"] for count in (1, 2)]
    assert repeated[0] == repeated[1]


@pytest.mark.parametrize(
    ("build", "keys", "objective"),
    [
        (tiny.llama_tied, {}, LogitObjective(hidden_weight=4.0)),
        (tiny.llama_tied, {"top_k": 3}, LogitObjective(top_k=3, hidden_weight=4.0)),
        (tiny.llama_tied, {"hidden_weight": 0}, LogitObjective()),
        (tiny.bert, {}, EmbeddingObjective(hidden_weight=4.0)),
        (tiny.bert, {"hidden_weight": 0}, EmbeddingObjective()),
        (tiny.vit, {}, LogitObjective()),
    ],
)
def test_targets_are_kept_of_as_many_samples_as_there_are_and_steps_take(
    build: Build, keys: dict[str, Any], objective: Any, tmp_path: Path
) -> None:
    def held(count: int = 1, data: dict[str, Any] | None = None, **more: Any) -> int:
        settings = {"autocast": "off", "batch_size": 3, "accumulation": 2, "steps": 2} | keys | more
        config = config_of(build, tmp_path, distillation=settings, data=data or {})
        return dry_run(config, devices=count)["memory"]["consolidation"]["targets"]

    model = real(build)
    with hidden_states(model):
        of_one = bytes_of([objective.target(call_model(model, batch_of(build, 1)), {})])
    assert held() == 3 * held(3) == 12 * of_one and held(steps=4) == 24 * of_one
    assert held(data={"training": 5}) == 5 * of_one
    assert held(3, data={"training": 9}, steps=4) == 3 * of_one
    assert build is tiny.vit or held(data={"source": "jsonl", "path": "x.jsonl"}) == 0


@pytest.mark.parametrize(("keys", "each"), [({}, 8), ({"distillation": {"optimizer": "adamw_8bit"}}, 2 + 8 / 256)])
def test_states_take_less_in_8_bits_and_weights_in_bfloat16(keys: dict[str, Any], each: float, tmp_path: Path) -> None:
    whole = dry_run(config_of(tiny.llama_tied, tmp_path, **keys))["memory"]["consolidation"]
    half = dry_run(config_of(tiny.llama_tied, tmp_path, dtype="bfloat16", **keys))["memory"]["consolidation"]
    numbers = whole["gradients"] / 4
    vectors = 2 * half["gradients"] - whole["gradients"]  # which stay in float32
    assert 0 < vectors < 0.2 * whole["gradients"] and half["student"] < whole["student"]
    assert whole["optimizer"] == pytest.approx(each * numbers, abs=1)
    assert half["optimizer"] == pytest.approx(2 * half["gradients"] if not keys else each * numbers, abs=1)


@pytest.mark.parametrize("build", [tiny.llama_tied, tiny.bert, tiny.dinov3])
def test_activations_are_what_a_real_forward_keeps(build: Build, tmp_path: Path) -> None:
    """Oracle: the memory of all that autograd holds after a real forward with fused attention, and block by block."""
    kept = []
    for repeats in (False, True):
        keys = {"distillation": {"gradient_checkpointing": repeats}}
        kept.append(dry_run(config_of(build, tmp_path, **keys))["memory"]["consolidation"]["activations"])
    config = config_of(build, tmp_path)
    student = trained_part(build_architecture(config), config).to_empty(device="cpu")
    model = build()  # whose buffers have their values
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for name, buffer in model.named_buffers():
        student.get_buffer(name).copy_(buffer)
    held: dict[int, tuple[int, torch.Tensor]] = {}
    read, current = [], [-1]  # the block that runs; -1 is none
    own = {parameter.untyped_storage().data_ptr() for parameter in student.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), (current[0], tensor))
        return tensor

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        read.append(args[0] if args else kwargs["hidden_states"])
        current[0] = len(read)

    for _, block in block_stack(student, nested_layers(student)):
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(lambda *_: current.__setitem__(0, -1))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = call_model(student, batch_of(build))
    inputs = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in read}
    sizes = Counter[int]()
    for place, (block_number, one) in held.items():
        if place not in own and place not in inputs:
            sizes[block_number] += one.untyped_storage().nbytes()
    assert output is not None and len(inputs) == 2
    assert kept[0] == pytest.approx(sizes.total() + sum(inputs.values()), rel=0.05)
    assert kept[1] == pytest.approx(sizes[-1] + max(sizes[1], sizes[2]) + sum(inputs.values()), rel=0.05)


def test_a_size_is_deployed_without_the_elastic_model_and_after_the_teacher(tmp_path: Path) -> None:
    """One size at a time, the largest of those that are exported; while a layer is aligned, or while it runs."""
    settings: dict[str, Any] = {"deployment": {"budgets": [0.9, 0.4]}, "evaluation": {"latency_batch_size": 40}}
    settings |= {"data": {"evaluation": 36}}
    config = config_of(tiny.llama_tied, tmp_path, **settings)
    held, size = dry_run(config)["memory"]["deployment"], dry_run(config)["budgets"][0]["bytes"]
    output = call_model(real(tiny.llama_tied), batch_of(tiny.llama_tied, 36)).logits
    assert held == {"deployed": held["deployed"], "outputs": 3 * bytes_of([output]), "all": held["all"]}
    assert held["deployed"] == pytest.approx(size, rel=0.05)
    held = dry_run(config_of(tiny.llama_tied, tmp_path, **settings | {"evaluation": {"latency_batch_size": 1}}))
    student = nest(real(tiny.llama_tied))
    table, ranks = probe_sensitivity(student, lambda _: 0.0, 4), uniform(student, 0.9)[0]
    ranks = {name: min(rank, table.ranks[name][-2]) for name, rank in ranks.items()}
    work = [8 * r * (4 * sum(nested_layers(student)[name].matrix_shape) - 2 * r) for name, r in ranks.items()]
    assert held["memory"]["deployment"]["factors"] == max(work)
    nothing = dry_run(config_of(tiny.llama_tied, tmp_path, distillation={"steps": 0}))["memory"]
    assert nothing["deployment"].keys() == {"teacher", "outputs", "all"}  # the qualities' targets come first
    assert nothing["evaluation"]["student"] < nothing["probe"]["student"]


@pytest.mark.parametrize(("budgets", "full"), [([0.9, 0.4], 0.6), ([0.8, 0.4], 0.2), ([0.7, 0.4], 0), ([1.0, 0.4], 1)])
def test_matrices_of_full_layers_are_in_the_artefact(budgets: list[float], full: float, tmp_path: Path) -> None:
    """By hand: a layer saves a quarter or nothing, so that .4 of the layers save .1 in all."""
    config = config_of(
        tiny.llama_tied, tmp_path, allocation={"budgets": budgets}, distillation={"steps": 0, "method": "balanced"}
    )
    architecture = build_architecture(config)
    held = tensor_bytes(trained_part(architecture, config)) + full * 4 * architecture.dense_parameters
    assert dry_run(config)["memory"]["evaluation"]["student"] == pytest.approx(held, abs=4)


def test_the_teacher_keeps_the_dtype_of_its_files(tmp_path: Path) -> None:
    """In bfloat16 it takes half as much, and so do its outputs and deployed sizes; the elastic model is in float32."""
    config = config_of(tiny.llama_tied, tmp_path, deployment={"budgets": [0.5]})
    before = dry_run(config)
    path = Path(config.architecture or "")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    after, model = dry_run(config), real(tiny.llama_tied)
    single, half, rest = before["memory"], after["memory"], bytes_of(model.buffers())
    for one, other in zip(before["budgets"], after["budgets"], strict=True):
        assert other["bytes"] == one["bytes"] / 2
    assert half["deployment"]["deployed"] < single["deployment"]["deployed"]
    for stage in ("probe", "consolidation"):
        assert half[stage]["teacher"] - rest == (single[stage]["teacher"] - rest) / 2 > 0
    assert half["probe"]["student"] == single["probe"]["student"]
    shared = [p for name, p in model.named_parameters() if "_proj" not in name]  # in another dtype it is not
    assert half["consolidation"]["student"] == single["consolidation"]["student"] + bytes_of(shared)
    assert half["probe"]["targets"] == single["probe"]["targets"] / 2
    assert half["probe"]["outputs"] == single["probe"]["outputs"] * 3 / 4
    assert half["decomposition"] == single["decomposition"]


def test_curvature_takes_no_probe(tmp_path: Path) -> None:
    result = dry_run(config_of(tiny.llama_tied, tmp_path, probe={"method": "curvature"}))
    assert result["memory"]["probe"]["all"] == result["operations"]["probe"] == result["probe"]["evaluations"] == 0


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


def test_tokens_and_stages_add_up(tmp_path: Path) -> None:
    result = dry_run(config_of(tiny.vit, tmp_path))
    assert result["sample_tokens"] == 17 and result["tokens"] == 2 * 2 * BATCH * 17  # 16 patches and the class token
    assert dry_run(config_of(tiny.llama_untied, tmp_path))["tokens"] == 2 * 2 * BATCH * LENGTH
    stages = {stage: number for stage, number in result["operations"].items() if stage != "all"}
    assert result["operations"]["all"] == sum(stages.values()) and list(result["memory"])[:4] == list(stages)
    once = operations.forward(build_architecture(config_of(tiny.vit, tmp_path)), 1)
    assert stages["probe"] > result["probe"]["evaluations"] * 5 * once * 0.9


def test_the_meta_model_has_the_buffers_and_ties_of_the_real_one(tmp_path: Path) -> None:
    save_config(tiny.llama_tied(), tmp_path)
    model, wanted = meta_model(tmp_path, "language"), tiny.llama_tied()
    shapes, expected = ({n: value.shape for n, value in one.state_dict().items()} for one in (model, wanted))
    assert shapes == expected
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())) and not model.training
