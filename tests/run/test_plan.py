"""The plan of a dry run, by hand-computed figures; devices and what is measured of them, by counted operations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import tiny
from flexrank.errors import FlexrankError
from flexrank.nn.switch import nested_layers
from flexrank.probe import probe_sensitivity
from flexrank.run import rates
from flexrank.run.config import RunConfig, load_config
from flexrank.run.dry_run import dry_run, operations
from flexrank.run.dry_run.architecture import build_architecture
from flexrank.run.dry_run.devices import GPUS, ByDtype, Device, find_device
from flexrank.run.dry_run.plan import longest_decomposition, training_dtype
from tiny import nest
from tiny_dry_runs import BATCH, LENGTH, config_of, flops, real, uniform
from tiny_runs import invoke, refused

ROOT = Path(__file__).parents[2]
#: The settings for less memory of examples/paper/README.md.
SMALLER = [
    "dtype=bfloat16", "distillation.optimizer=adamw_8bit", "distillation.gradient_checkpointing=true",
    "distillation.method=balanced", "allocation.method=joint", "allocation.savings=parameters",
]  # fmt: skip
DEVICE = Device(
    name="round", memory=10**9, disk=1e3, link=1e2, price=3.0,
    products=ByDtype(float64=1e6, float32=2e6, bfloat16=8e6), share=ByDtype(float64=0.5, float32=0.5, bfloat16=0.25),
)  # fmt: skip


def plan_of(config: RunConfig, devices: int = 1, **changes: Any) -> dict[str, Any]:
    return dry_run(config, device=DEVICE.model_copy(update=changes), devices=devices)["plan"]


def seconds_of(plan: dict[str, Any]) -> dict[str, Any]:
    return {stage: row["hours"] and 3600 * row["hours"] for stage, row in plan["stages"].items()}


def test_of_one_device_seconds_are_operations_over_rates_and_bytes_over_the_disks(tmp_path: Path) -> None:
    """Weights of float32; a checkpoint of trained weights and two states each after 2 steps and after the last one."""
    config = config_of(tiny.llama_tied, tmp_path, distillation={"steps": 3, "checkpoint_every": 2, "autocast": "off"})
    result = dry_run(config)
    plan, counts, sizes = plan_of(config, link=None), result["operations"], result["parameters"]
    base, elastic = (4 * sizes[name] + bytes_of_buffers() for name in ("model", "elastic_model"))
    saved = 2 * 3 * result["memory"]["consolidation"]["gradients"]
    assert seconds_of(plan) == pytest.approx(
        {
            "calibration": counts["calibration"] / 1e6 + base / 1e3,
            "decomposition": counts["decomposition"] / 0.5e6 + elastic / 1e3,
            "probe": counts["probe"] / 1e6 + (base + elastic) / 1e3,
            "consolidation": counts["consolidation"] / 1e6 + (base + elastic + saved) / 1e3,
            "evaluation": None,
            "deployment": None,
        }
    )
    hours = sum(row["hours"] or 0 for row in plan["stages"].values())
    assert plan["hours"] == pytest.approx(hours) and plan["money"] == pytest.approx(3 * hours)
    assert plan["tokens_per_second"] == pytest.approx(3 * 2 * BATCH * LENGTH / seconds_of(plan)["consolidation"])


def bytes_of_buffers() -> int:
    return sum(buffer.nbytes for buffer in real(tiny.llama_tied).buffers())


def test_two_processes_divide_the_work_and_exchange_sums(tmp_path: Path) -> None:
    """One of two batches of calibration; two of three rows; moments once, and active components in each of two steps.

    In a ring of two a process sends what it sums once. Sizes at .9 and .4 are drawn two times in three and once.
    """
    config = config_of(tiny.llama_tied, tmp_path, distillation={"autocast": "bfloat16"})
    part = config_of(tiny.llama_tied, tmp_path, data={"calibration": BATCH}, distillation={"batch_size": 2})
    whole, own, student = dry_run(config), dry_run(part), nest(real(tiny.llama_tied))
    works = {stage: row["work"] for stage, row in plan_of(config, 2)["stages"].items()}
    assert works["calibration"]["operations"] == own["operations"]["calibration"] < whole["operations"]["calibration"]
    assert works["consolidation"]["operations"] == own["operations"]["consolidation"]
    assert works["probe"]["operations"] == whole["operations"]["probe"] / 2
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(student).items()}
    active = [sum(r * sum(shapes[name]) for name, r in uniform(student, b)[0].items()) for b in (0.9, 0.4)]
    links = {stage: work["link_bytes"] for stage, work in works.items() if work}
    assert links == pytest.approx(
        {
            "calibration": whole["moments"]["all"],
            "decomposition": works["decomposition"]["disk_bytes"] / 2,
            "probe": 0,
            "consolidation": 2 * 4 * (2 * active[0] + active[1]) / 3,
        }
    )
    plan = plan_of(config, 2)
    work = works["consolidation"]
    expected = work["operations"] / 2e6 + work["disk_bytes"] / 1e3 + work["link_bytes"] / 1e2
    assert seconds_of(plan)["consolidation"] == pytest.approx(expected)
    assert plan["money"] == pytest.approx(2 * 3 * plan["hours"])


def test_sharded_processes_divide_layers_and_gather_what_they_use(tmp_path: Path) -> None:
    """Four processes, two batches a step, of which each has three quarters to fetch; vectors of sizes stay whole.

    Sizes at .9 and .4 share factors below full rank; at .9 three fifths of the layers are full, if a layer saves a
    quarter at least.
    """
    keys = {"gradient_checkpointing": True, "accumulation": 2, "autocast": "off", "batch_size": 4}
    whole, own = (
        dry_run(config_of(tiny.llama_tied, tmp_path, distillation=keys | more), device=DEVICE, devices=4)
        for more in ({}, {"sharded": True})
    )
    (block, _), student = real(tiny.llama_tied).model.layers, nest(real(tiny.llama_tied))
    blocks = 2 * sum(p.nbytes for p in block.parameters())
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(student).items()}
    vectors = 4 * 2 * sum(map(sum, shapes.values()))
    before, after = (result["memory"]["consolidation"] for result in (whole, own))
    factors = before["gradients"] - vectors
    full = round(0.6 * sum(m * n for m, n in shapes.values()))
    assert after["teacher"] == before["teacher"] - blocks + blocks // 4
    assert after["student"] == before["student"] - factors + factors // 4 + 4 * full // 4
    assert after["gradients"] == vectors + factors // 4 and after["optimizer"] == 2 * vectors + 2 * factors // 4
    # A block's factors as they go back, beside one layer's gradients of 4 bytes and twice that in order; or two blocks.
    largest = max(before_rank * sum(shapes[name]) for name, before_rank in trained_ranks(student).items())
    assert after["gathered"] == max(blocks, factors // 2 + 12 * largest)
    assert after["all"] < before["all"] and after["activations"] == before["activations"]
    active = [sum(r * sum(shapes[name]) for name, r in uniform(student, b)[0].items()) for b in (0.9, 0.4)]
    links = [result["plan"]["stages"]["consolidation"]["work"]["link_bytes"] for result in (whole, own)]
    drawn = (2 * active[0] + active[1]) / 3
    assert links == pytest.approx([2 * 1.5 * 4 * drawn, 2 * 2 * 0.75 * (12 * drawn + blocks)])


def trained_ranks(student: Any) -> dict[str, int]:
    """The largest candidate below full, unless the size at .9 has less."""
    table = probe_sensitivity(student, lambda _: 0.0, 4)
    return {name: min(rank, table.ranks[name][-2]) for name, rank in uniform(student, 0.9)[0].items()}


def test_trained_vectors_are_summed_too_and_four_processes_send_one_and_a_half_times(tmp_path: Path) -> None:
    config = config_of(tiny.llama_tied, tmp_path, distillation={"method": "paper"}, allocation={"budgets": [0.4]})
    student = nest(real(tiny.llama_tied))
    layers, ranks = nested_layers(student), uniform(student, 0.4)[0]
    norms = sum(p.numel() for name, p in student.named_parameters() if "norm" in name)
    active = norms + sum(rank * sum(layers[name].matrix_shape) for name, rank in ranks.items())
    work = plan_of(config, 4)["stages"]["consolidation"]["work"]
    assert work["link_bytes"] == pytest.approx(2 * 1.5 * 4 * active)


def test_layers_of_a_block_go_to_two_processes_by_their_cost(tmp_path: Path) -> None:
    """By hand: gate, down, k and v to one process, up, q and o to the other, in each of two blocks."""
    config = config_of(tiny.llama_tied, tmp_path)
    architecture = build_architecture(config)
    costs = {n.rpartition(".")[2]: c for n, c in operations.layer_decompositions(architecture, config).items()}
    loads = [sum(costs[f"{n}_proj"] for n in names) for names in (("gate", "down", "k", "v"), ("up", "q", "o"))]
    assert longest_decomposition(architecture, config, 2) == 2 * max(loads)
    assert longest_decomposition(architecture, config, 1) == operations.decomposition(architecture, config)


def test_memory_of_a_process_is_divided_by_the_rows_of_a_step_alone(tmp_path: Path) -> None:
    config = config_of(tiny.llama_tied, tmp_path)
    one, three = (dry_run(config, device=DEVICE, devices=count) for count in (1, 3))
    before, after = one["memory"]["consolidation"], three["memory"]["consolidation"]
    assert {part for part in before if before[part] != after[part]} == {"activations", "targets", "outputs", "all"}
    of_a_row = config_of(tiny.llama_tied, tmp_path, distillation={"batch_size": 1})
    assert after == dry_run(of_a_row)["memory"]["consolidation"] and after["outputs"] * 3 == before["outputs"]
    others = [{k: v for k, v in result["memory"].items() if k != "consolidation"} for result in (one, three)]
    assert others[0] == others[1]
    assert three["plan"]["stages"]["consolidation"]["bytes"] == after["all"]
    uneven = dry_run(config, device=DEVICE, devices=2)["notes"]
    assert any(
        "batch_size is 3, which 2 processes do not share evenly: a step takes the time of 2" in n for n in uneven
    )
    assert not any("evenly" in note for note in three["notes"])


def test_a_stage_fits_to_the_last_byte(tmp_path: Path) -> None:
    config = config_of(tiny.llama_tied, tmp_path)
    needed = {stage: parts["all"] for stage, parts in dry_run(config)["memory"].items()}
    most = max(needed.values())
    assert plan_of(config, memory=most)["fits"]
    plan = plan_of(config, memory=most - 7)
    missing = {stage: row["bytes_missing"] for stage, row in plan["stages"].items() if row["bytes_missing"]}
    assert missing == {stage: 7 for stage, size in needed.items() if size == most} and not plan["fits"]


@pytest.mark.parametrize(
    ("name", "label", "gpu", "devices"),
    [
        ("llama-3.2-1b", "Llama 3.2 1B | 1 x 24", "rtx4090", 1), ("llama-3.2-1b", "Llama 3.2 1B | 8 x 80", "h100", 8),
        ("llama-3.2-3b", "Llama 3.2 3B | 1 x 24", "rtx4090", 1), ("llama-3.1-8b", "Llama 3.1 8B | 8 x 80", "h100", 8),
    ],
)  # fmt: skip
def test_the_page_shows_the_plans(
    name: str, label: str, gpu: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = f"examples/paper/{name}.yaml"
    own = load_config(path).distillation
    rows = [f"batch_size={devices * own.batch_size}", f"accumulation={own.accumulation // devices}"]
    config = load_config(path, [*SMALLER, *(f"distillation.{row}" for row in rows)])
    plan = dry_run(config, device=find_device(gpu), devices=devices)["plan"]
    stages = plan["stages"].values()
    missing = max(row["bytes_missing"] for row in stages)
    cells = [
        label, *(f"{row['bytes'] / 1e9:.1f}" for row in stages), f"no, by {missing / 1e9:.1f}" if missing else "yes",
        *(f"{row['hours']:.3g}" for row in stages if row["work"]), f"{plan['tokens_per_second']:,.0f}",
        f"{plan['hours']:.3g}", f"{plan['money']:,.0f}",
    ]  # fmt: skip
    assert f"| {' | '.join(cells)} |" in Path("docs/scale.md").read_text(encoding="utf8")


@pytest.mark.parametrize(("name", "gpu"), [("llama-3.1-8b", "h100"), ("llama-3.2-1b", "rtx4090")])
def test_the_examples_fit_one_gpu(name: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every stage, of 80 and of 24 GB; the page has the most bytes and the hours."""
    monkeypatch.chdir(ROOT)
    plan = dry_run(load_config(f"examples/{name}.yaml"), device=find_device(gpu))["plan"]
    needed = [row["bytes"] for row in plan["stages"].values()]
    assert plan["fits"] and all(size <= {"h100": 80e9, "rtx4090": 24e9}[gpu] for size in needed)
    page = Path("docs/scale.md").read_text(encoding="utf8")
    assert re.search(rf"examples/{name}.yaml\)[^(]* {max(needed) / 1e9:.1f} GB", page)
    assert re.search(rf"examples/{name}.yaml --dry-run --gpu {gpu} +# {plan['hours']:.0f} hours", page)


@pytest.mark.parametrize(
    ("autocast", "dtype", "auto", "expected"),
    [
        ("off", "float32", "bfloat16", "float32"), ("off", "bfloat16", "off", "bfloat16"),
        ("auto", "float32", "bfloat16", "bfloat16"), ("auto", "float32", "off", "float32"),
        ("bfloat16", "float32", "off", "bfloat16"),
    ],
)  # fmt: skip
def test_consolidation_computes_in_the_dtype_of_autocast(
    autocast: str, dtype: str, auto: Any, expected: str, tmp_path: Path
) -> None:
    config = config_of(tiny.llama_tied, tmp_path, dtype=dtype, distillation={"autocast": autocast})
    assert training_dtype(config, DEVICE.model_copy(update={"auto": auto})) == expected
    assert plan_of(config)["stages"]["probe"]["work"]["dtype"] == dtype


@pytest.mark.parametrize("devices", [1, 4])
def test_without_steps_consolidation_takes_nothing(devices: int, tmp_path: Path) -> None:
    config = config_of(tiny.llama_tied, tmp_path, distillation={"steps": 0})
    result = dry_run(config, device=DEVICE, devices=devices)
    assert result["memory"]["consolidation"] == {"all": 0} and result["plan"]["stages"]["probe"]["hours"] > 0


def test_what_does_not_run_takes_no_time(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"probe": {"method": "curvature"}, "distillation": {"steps": 0}}
    plan = plan_of(config_of(tiny.llama_tied, tmp_path, **nothing))
    assert plan["stages"]["probe"]["hours"] == 0 and plan["tokens_per_second"] is None
    without = plan_of(config_of(tiny.llama_tied, tmp_path), price=None)
    assert without["money"] is without["stages"]["probe"]["money"] is None


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config beside a device's file, in the current directory."""
    config = config_of(tiny.llama_tied, tmp_path, architecture="config.json")
    (tmp_path / "tiny.json").write_text(json.dumps(config.model_dump(mode="json")))
    (tmp_path / "plan.json").write_text(DEVICE.model_dump_json())
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny.json"


def test_the_command_shows_the_plan(written: Path) -> None:
    printed = invoke("run", written, "--dry-run", "--gpu", "local", "--gpus", "3", "--price", "7").stdout
    result = json.loads(invoke("run", written, "--dry-run", "--gpu", "plan.json", "--gpus", "3", "--json").stdout)
    plan = result["plan"]
    assert plan == json.loads(json.dumps(plan_of(config_of(tiny.llama_tied, written.parent), 3)))
    assert "plan: 3 x round of 1.00GB" in printed
    assert f"{plan['money'] * 7 / 3:,.2f} at 7 an hour and device" in printed
    (written.parent / "small.json").write_text(
        DEVICE.model_copy(update={"memory": 50_000, "price": None}).model_dump_json()
    )
    printed = invoke("run", written, "--dry-run", "--gpu", "small.json").stdout
    assert "no, by " in printed and "no price: give --price" in printed


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--gpu", "h200"], "--gpu belongs to --dry-run"),
        (["--dry-run", "--gpus", "2"], "--gpus belongs to --gpu"),
        (["--dry-run", "--price", "2"], "--price belongs to --gpu"),
        (["--dry-run", "--gpu", "h200", "--gpus", "0"], "--gpus is 0; it is a number of devices, 1 or more"),
        (["--dry-run", "--gpu", "h200", "--price", "-1"], "--price is -1; it is the price of one GPU for an hour"),
        (["--dry-run", "--gpu", "h2000"], f"--gpu 'h2000' is unknown; it is {', '.join(GPUS)}, local, or a file"),
        (["--dry-run", "--gpu", "none.json"], "none.json: no such file; flexrank measure --calibrate-plan writes it"),
        (["--dry-run", "--gpu", "wrong.json"], "wrong.json: share.float32: input should be greater than 0"),
        (["--dry-run", "--gpu", "alone.json", "--gpus", "2"], "device 'round' has no speed of a link"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], part: str, written: Path) -> None:
    value = json.loads(DEVICE.model_dump_json())
    for name, change in {"wrong": {"share": value["share"] | {"float32": 0}}, "alone": {"link": None}}.items():
        (written.parent / f"{name}.json").write_text(json.dumps(value | change))
    assert part in refused("run", written, *arguments)


def test_a_local_device_needs_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlexrankError, match="plan.json: no such file"):
        find_device("local")
    assert find_device("h100").memory == 80 * 10**9 and find_device("h100", 1.25).price == 1.25
    assert DEVICE.rate("float16") == DEVICE.rate("bfloat16") == 2e6


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> rates.Size:
    size = rates.Size(64, 96, 2, 24, 16)
    monkeypatch.setitem(rates.SIZES, "cpu", size)
    monkeypatch.setattr(rates, "DISK_BYTES", 2**20)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return size


def test_measured_work_is_the_counted_work(small: rates.Size, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where seconds are the operations that torch counts, rates are 1; of a factorisation it counts products alone."""
    import torch

    cpu = torch.device("cpu")
    monkeypatch.setattr(rates, "_seconds", lambda run, _: flops(run))
    assert rates.product_rate(small, cpu, torch.float32) == 1
    assert rates.factorisation_rate(small, cpu) > 1
    monkeypatch.setattr(rates.models, "skeleton", lambda place, make=rates.models.skeleton: eager(make(place)))
    assert rates.step_rate(small, cpu, None) == rates.step_rate(small, cpu, torch.bfloat16) == 1


def eager(model: Any) -> Any:
    """With attention as plain products, which the counter sees."""
    model.set_attn_implementation("eager")
    return model


def test_a_device_is_measured_and_read_back(small: rates.Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rates, "REPEATS", 1)
    result = invoke("measure", "--calibrate-plan", "--json")
    assert result.exit_code == 0, result.output
    device = find_device("local")
    assert json.loads(result.stdout) == json.loads(Path("plan.json").read_text()) == device.model_dump()
    assert device.link is device.price is None and device.auto in ("off", "bfloat16") and device.memory > 2**28
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json"}
    monkeypatch.setattr(rates, "_seconds", lambda run, _: run() or 0.5)
    assert rates.write_rate(tmp_path) == 2**21
