"""Writes the result pages in docs/ from saved results: every number in their tables is read from a result.json."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flexrank.errors import FlexrankError
from flexrank.files import write_text
from research.experiment import BENCHES, COMPARISONS, STUDIES, Experiment, find_experiment
from research.result import RESULT, Result, claim_cells, read_result, shown_rows

_STUDIES = """# The paper's evidence, reproduced

`make results` writes this page; `python -m research --page` writes it again from saved results. Each section is one
command, and its figure is drawn from the same `results/NAME/result.json`. ± is the standard deviation over seeds.
*agrees* and *differs* are computed from the numbers beside them. Results of `adaptation` are from before the steps that
mix components (docs/concepts/consolidation.md).
"""
_BENCHES = """# Performance

`make bench` writes this page; `python -m research --page` writes it again from saved results. Each section is one
command. Ratios are medians of alternating runs in one process, but those of `serving` are of servers run one after the
other, each at its best of three, and the eigenproblems of `decompose` are timed once. *met*
and *missed* are computed from the numbers beside them. What the benches no longer show is left out.
The consolidated models of `sts`, `quantized`, `speculative` and `cascade` are from before the steps that mix components
(docs/concepts/consolidation.md).
"""
_COMPARISONS = """# Rivals

`python -m research --page` writes this page from saved results. Each section is one command. Every method gets the same
model, calibration data, held-out samples and definition of size: the deployed parameters of the factorised layers over
their dense ones. All rank methods are gauge-aligned; adapters count, indices do not. *met* and *missed* are computed
from the numbers beside them. docs/baselines.md compares our implementations with the authors' own code.

**On your own model**: `python -m research compare --config CONFIG` and `compare-trained --config CONFIG` take the
model, data and budgets from a run's configuration, in float32, and 1e-4 where it has no learning rate; a training
step takes one batch, without accumulation or weight decay, and clips gradients at norm 1. Keys that are given and not
used are named. `--jobs N` runs N methods at once, `--seeds N` repeats everything, `--tasks` adds tables of lm-eval
tasks, and an interrupted comparison continues where it stopped. None of the language models below is above chance on
ARC-Easy or PIQA, so they are not scored by tasks.

**Training-free.** *published* ranks are those of the method's own paper, found by its own search if it has one. What
rounding leaves of a uniform share is filled up. Searched ranks and *paper* ranks may end below their budgets, mostly by
less than .02 and on ResNet-20 by up to .035; figures show each size where it is. A constant that a paper leaves open
(ASVD, SVD-LLM V2, LEMS, PIFA) is tuned over four values on the tuning half. *paper* and *joint* ranks are flexrank's
two allocations, from a sensitivity table of the method's own factors (for PIFA, of the factors that it starts from).
*nested* says whether each size is a prefix of all larger ones, so one artefact holds them all. Times are wall times,
each measured once. DRONE, SVD-LLM and DataSVD share one optimum, so with equal ranks their lines coincide. MiniLM's
retrieval among STS sentences (*mrr*) says nothing, because nearly every method finds each sentence's pair among so few;
*docstring mrr*, with training, is of 128 pairs of docstrings' parts.

**Trained.** All methods see the same number of training tokens in total; a method that trains each size separately
splits them among its sizes. At equal training time, each method gets the number of steps that fits into flexrank's
training time, by its own speed at equal tokens. *At its best* (stories260k), each size that is trained separately has
all the steps. Times are process times. The probe, which chooses ranks once and does not grow with training, has its own
column and is in no training time; ACIP, LLM-Pruner and MatFormer learn their order within theirs. *±* is the standard
deviation over seeds; a row without it has one seed, and differences below such a ± elsewhere decide nothing. Each
method gets four learning rates, tried on the tuning half, and more while a best one is at an edge. One rate serves all
sizes of one artefact; a size that is trained separately has the rate that is best for it. Each method runs in a process
of its own, whose time and peak memory are shown. The trainings are short, 160 to 320 steps, which favours methods that
start from a good decomposition. ACIP has 96 to 192 of them to learn an order of singular values, and one set of
adapters for all sizes: at .9 on pycode5m and stories260k it is behind plain SVD.

**flexrank is weaker in the trained tables, except pycode5m's, than it is now.** They are from before the steps that
mix components (docs/concepts/consolidation.md), by which small sizes gain most: in the same trainings, by one seed on
the tuning half, ResNet-20's .2 goes from .491 to .582 and stories260k's from 3.48 to 3.13 nats, and no size is worse.
In pycode5m's table flexrank was trained again, on a busier machine than its rivals, which therefore have up to 1.36
times the steps at equal time. The text below is about the tables.

**Rivals that are weaker here than they can be** (docs/log.md). In all trained tables but pycode5m's, one rate serves
all separately trained sizes too, the second phases of ACIP and of SVD-LLM's adapters began with the first batches
again, and rivals' optimizer was a slower form of flexrank's, which lowers their steps at equal time. Before
babyllama's and pycode5m's tables, SVD-LLM's adapters were at uniform ranks alone, on V before U. On babyllama the
best one over all sizes hardly moves `svd-llm + lora, joint`, though larger ones are better from .5 down, and worse
from .8 up. ASVD's search ends below its budgets and stays there. A head, a pooler or a patch embedding that a method
cannot reduce counts in its budgets unless `layers.exclude` names it.

**Where flexrank is behind, and why.** LEMS weighs outputs by the loss's gradients, DataSVD weighs activations alone;
flexrank's default, `fisher`, adopts that idea and is close to LEMS, ahead at some sizes and behind at others. PIFA and
A3 make one model per size, and PIFA refits each layer to the outputs of the compressed layers before it, which one
artefact for all sizes cannot do: with flexrank's joint ranks it is ahead of all nested methods from .4 down on MiniLM
and pycode5m, from .6 down on ResNet-20 and from .8 down on stories260k. `refit` (`flexrank deploy RUN --budget B
--refit`) does the same from flexrank's own components and ranks, also for one size at a time; components keep their
weights, and biases are fitted too. On stories260k it is ahead of every method from .9 to .5; below, PIFA is ahead with
one choice of ranks or another, and at .2 so is A3. On ResNet-20 it is ahead of every rival from .6 down, and within the
standard error of .5 points above; on pycode5m it is ahead of every method from .6 down, and at most .0008 nats behind
above; on MiniLM it is ahead of every method at every budget. It needs no training, and it is also ahead of the shared
weights after the short trainings below: on ResNet-20 from .5 down (at .2 it loses 27 points and they lose 38), on
pycode5m at .5, and by their tables on MiniLM from .4 down; on stories260k it is far behind these. `flexrank
deploy --refit` prints the quality of both.

Among trained rivals, nested widths (`matformer` in the tables) lead on stories260k from .5 down, and at .7 and .6 by
less than flexrank's ± over three seeds (in *ablation* below); at .2 LLM-Pruner and ACIP are ahead too, and with ACIP
at babyllama's .2: complete heads and channels hold more per parameter than a few ranks of such narrow matrices. Fewer
channels beside lower ranks would give flexrank most of that on stories260k, and a wider model something from .4 down
(docs/log.md, "Narrower feed-forward parts"). Sizes that are trained separately can be ahead at large sizes, where
shared weights pay for the small ones. With a rate for each size, which only pycode5m's table has yet, `independent`
is ahead of flexrank there by .0002 to .0064 nats from .9 to .4, and behind by .006 at .3 and by .021 at .2, though its
small sizes train at up to 32 times the rate of its largest, and one artefact has one rate. With all steps for
each size, which are eight times as many in total, `independent` is ahead at every size of stories260k. On the vision
transformer, flexrank at its defaults, flexrank as printed and separate training are within 14 of 5,000 images of each
other from .9 to .3: the standard error is 32 images. Of methods with one artefact flexrank is first at every budget
from .8 down on MiniLM, pycode5m, the vision transformer and ResNet-20 (where its printed form is the only other one),
and not on the two small Llamas, stories260k and babyllama. One rate for all sizes is a compromise: on babyllama the
best one hardly moves flexrank as printed, though larger ones are better from .5 down.

**What each part of consolidation is worth** (`python -m research ablation`, also with `--config`): flexrank by its
defaults, and without one part at a time, from the same factors and ranks, at equal steps and at one learning rate. A
distance in accuracy counts as half a point at least. ResNet-20 was scored on 2,000 images, with a standard error of .8
points; today's code takes all of the reporting half. On ResNet-20 only the vectors and all parts together are worth
something at each seed; at .7, drawing the largest size less often is better at two seeds of three. Balancing the losses
and drawing the largest size more often are there for the largest sizes: on stories260k, MiniLM and pycode5m the
verdicts on *losses balanced* and on *all of them (eq. 6)* rest on the largest sizes, and small ones are a little better
without them. On pycode5m, whose .9 and .8 are within .002 nats of the base model, the last digits decide.
"""


class Page(NamedTuple):
    """A page of results."""

    path: Path
    head: str
    experiments: tuple[str, ...]
    claim_columns: tuple[str, str]  #: the titles of the first two columns of claims


#: By the kind of experiment.
PAGES = {
    "study": Page(Path("docs", "results.md"), _STUDIES, STUDIES, ("claim", "paper")),
    "bench": Page(Path("docs", "performance.md"), _BENCHES, BENCHES, ("goal", "figure")),
    "comparison": Page(Path("docs", "comparison.md"), _COMPARISONS, COMPARISONS, ("goal", "figure")),
}


def write_pages(results: Path) -> dict[Path, list[str]]:
    """Writes the page of each kind that has results; returns, by page, the experiments without results."""
    written = {}
    for kind, page in PAGES.items():
        found = {name: _directories(results, name) for name in page.experiments}
        if any(found.values()):
            _write_page(kind, [(find_experiment(name), path) for name, paths in found.items() for path in paths])
            written[page.path] = [name for name, paths in found.items() if not paths]
    if not written:
        raise FlexrankError(f"{results}: holds no results; run python -m research NAME first")
    return written


def _directories(results: Path, name: str) -> list[Path]:
    others = sorted(results.glob(f"{name}-*")) if name in COMPARISONS else [results / f"{name}-full"]
    found = [path for path in (results / name, *others) if (path / RESULT).is_file()]
    known = {path: read_result(path) for path in found}  # one name may begin with another
    return [path for path, one in known.items() if one["name"] == name and "--half" not in one["command"]]


def _write_page(kind: str, entries: Iterable[tuple[Experiment, Path]]) -> None:
    page = PAGES[kind]
    sections, overview = [], []
    for experiment, directory in entries:
        result = read_result(directory)
        sections.append(_section(experiment, result, Path("..", directory), page.claim_columns))
        label = experiment.name + (" --full" if result["form"] == "full" else "")
        overview += [[label, *claim_cells(one)] for one in result["claims"]]
    summary = _markdown([kind, *page.claim_columns, "here", ""], overview)
    write_text(page.path, "\n".join([page.head, summary, "", *sections]))


def _section(experiment: Experiment, result: Result, directory: Path, columns: tuple[str, str]) -> str:
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
        _claims(result["claims"], columns),
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


def _claims(claims: Iterable[Mapping[str, Any]], columns: tuple[str, str]) -> str:
    rows = [[*claim_cells(one), one["why"]] for one in claims]
    return _markdown([*columns, "here", "", "why"], rows) if rows else ""


def _settings(settings: Mapping[str, Any]) -> str:
    return "; ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
