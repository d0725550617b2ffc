"""Writes the result pages in docs/ from saved results: every number in them is read from a result.json."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.files import write_text
from research.experiment import BENCHES, COMPARISONS, STUDIES, Experiment, find_experiment
from research.result import RESULT, Result, claim_cells, read_result, shown_rows

_STUDIES = """# The paper's evidence, reproduced

Made by `make results`, or from saved results by `python -m research --page`. Each section is one command, and its
figure is drawn from the same `results/NAME/result.json`. ± is the standard deviation over seeds. *agrees* and *differs*
are computed from the numbers beside them. Results of the Xeon are as measured before the studies moved to `research/`,
without what the studies no longer show.
"""
_BENCHES = """# Performance

Made by `make bench`, or from saved results by `python -m research --page`. Each section is one command. Ratios are
medians of runs in turn in one process; eigenproblems of `decompose` are timed once. *met* and *missed* are computed
from the numbers beside them. Results of the Xeon, and those without a processor's name, are as measured before the
benches moved to `research/`, without what the benches no longer show.
"""
_COMPARISONS = """# Rivals

From saved results, by `python -m research --page`. Each section is one command. Every method has the same model,
calibration, held-out samples and definition of size: deployed parameters of the factorised layers over their dense
ones, gauge-aligned for all rank methods; adapters and the like count, indices do not. *met* and *missed* are computed
from the numbers beside them. docs/baselines.md holds ours against the authors' own code.

**On your model**: `python -m research compare --config CONFIG` and `compare-trained --config CONFIG` take the model,
data and budgets of a run's configuration, in float32. `--jobs N` runs as many methods at once, `--seeds N` repeats all,
`--tasks` adds tables of lm-eval's tasks, and an interrupted comparison goes on where it was. Of the language models
below none has an accuracy above chance on ARC-Easy or PIQA, so none is scored by tasks.

**Training-free**: *published* are the ranks of the method's own paper, by its own search where it has one; what
rounding leaves of a uniform share is filled. A constant that a paper leaves free has four values, tried on the tuning
half; all of SVD-LLM V2's are alike here, for its ranks never reach their bound. *paper* and *joint* are flexrank's
allocations, from a sensitivity table of the method's own factors, for PIFA of those that it starts from. *nested* says
whether each size is a prefix of all larger ones, by which one artefact holds them. DRONE's search of ranks is left out.
Seconds are of the clock, each measured once. DRONE, SVD-LLM and DataSVD have one optimum: their lines lie on each
other. pycode5m and ResNet-20 were measured before ranks were filled and constants tried.

**Trained**: all methods have as many training tokens in all; one that trains each size by itself has its share of them
for each. At equal training time each has as many steps as take flexrank's seconds, by what each took at equal tokens;
seconds are those that a process computed. pycode5m, babyllama and MiniLM lack that panel.
The probe, of which ranks are chosen once and whose seconds do not grow with training, has a column of its own. Each
method has four rates, tried on the tuning half, and up to two more where the best is at an edge. Seconds and the peak
of memory are of a process of its own. These are short trainings, of 160 to 320 steps, which favour methods that start
from a good decomposition. **pycode5m and babyllama were measured before four mends that favour rivals**:
heads of queries go one by one with nested widths and LLM-Pruner, ACIP's removal follows its line, with adapters of the
authors' width, rates are tried in finer steps, and best rates at an edge ask for more; they are still to be measured
again.

**Where ours is behind, and why.** LEMS weighs outputs by the loss's gradients, DataSVD by activations alone; flexrank's
default, `fisher`, took that from it, and lies near it, at some sizes ahead and at some behind. PIFA and A3 make a model
for each size, and PIFA fits each layer again to what the compressed layers before it give, which no artefact of all
sizes can: on stories260k, 64 columns wide, it is ahead even at large sizes with flexrank's ranks, on MiniLM from .5
down, the more the smaller the size. A short consolidation gives more than that there, to all sizes at once
(docs/performance.md). Of trained rivals nested widths lead at small sizes of that model too: whole heads and channels
hold more, per parameter, than a few ranks of matrices so narrow. Sizes trained each by itself can be ahead at large
sizes, where one set of weights pays for its small ones.
"""
#: For each kind: the page, its head, its experiments, and the titles of the first two columns of claims.
PAGES = {
    "study": (Path("docs", "results.md"), _STUDIES, STUDIES, ("claim", "paper")),
    "bench": (Path("docs", "performance.md"), _BENCHES, BENCHES, ("goal", "figure")),
    "comparison": (Path("docs", "comparison.md"), _COMPARISONS, COMPARISONS, ("goal", "figure")),
}


def write_pages(results: Path) -> dict[Path, list[str]]:
    """Writes the page of each kind that has results; returns, by page, the experiments without results."""
    written = {}
    for kind, (page, _, names, _) in PAGES.items():
        places = {name: _directories(results, name) for name in names}
        if any(places.values()):
            _write_page(kind, [(find_experiment(name), path) for name in names for path in places[name]])
            written[page] = [name for name, paths in places.items() if not paths]
    if not written:
        raise FlexrankError(f"{results}: holds no results; run python -m research NAME first")
    return written


def _directories(results: Path, name: str) -> list[Path]:
    others = sorted(results.glob(f"{name}-*")) if name in COMPARISONS else [results / f"{name}-full"]
    found = [path for path in (results / name, *others) if (path / RESULT).is_file()]
    return [path for path in found if read_result(path)["name"] == name]  # one name may begin with another


def _write_page(kind: str, entries: Iterable[tuple[Experiment, Path]]) -> None:
    page, head, _, named = PAGES[kind]
    sections, overview = [], []
    for experiment, directory in entries:
        result = read_result(directory)
        sections.append(_section(experiment, result, Path("..", directory), named))
        label = experiment.name + (" --full" if result["form"] == "full" else "")
        overview += [[label, *claim_cells(one)] for one in result["claims"]]
    summary = _markdown([kind, *named, "here", ""], overview)
    write_text(page, "\n".join([head, summary, "", *sections]))


def _section(experiment: Experiment, result: Result, directory: Path, named: tuple[str, str]) -> str:
    """Returns the section of a result: what it shows, command, machine, figure, claims, tables and settings.

    `directory` is relative to the page.
    """
    title = experiment.title + (" (full)" if result["form"] == "full" else "")
    if experiment.name in COMPARISONS:
        title += ": " + ", ".join(result["data"])
    parts = [
        f"## {title}",
        f"Shows {experiment.shows}." + (f" The paper: {experiment.paper}." if experiment.paper else ""),
        f"`{result['command']}` · {_machine_line(result['machine'])}",
        f"![{title}]({directory / experiment.name}.png)" if experiment.draw else "",
        _claims(result["claims"], named),
        *(f"{one['title']}\n\n{_markdown(one['columns'], shown_rows(one))}" for one in result["tables"]),
        f"Settings: {_settings(result['settings'])}." if result["settings"] else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine_line(machine: Mapping[str, Any]) -> str:
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    gpu = [machine["gpu"]] if "gpu" in machine else []
    return ", ".join([machine["processor"], threads, *gpu, f"torch {machine['torch']}"])


def _markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    drawn = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([drawn[0], "|" + "---|" * len(lines[0]), *drawn[1:]])


def _claims(claims: Iterable[Mapping[str, Any]], named: tuple[str, str]) -> str:
    rows = [[*claim_cells(one), one["why"]] for one in claims]
    return _markdown([*named, "here", "", "why"], rows) if rows else ""


def _settings(settings: Mapping[str, Any]) -> str:
    return "; ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
