"""A run's deployed models against their base: latency for a prompt and for decoding, tokens a second, peak memory."""

import copy
import functools
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank.data.batches import Batch, call_model, model_device
from flexrank.data.metrics import inference
from flexrank.deployment.fitting import Limits, fit
from flexrank.deployment.latency import latency_ratio, seconds_of_forward, time_chain
from flexrank.deployment.planning import Planner, Plans
from flexrank.deployment.timing import TimeTable
from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.profiles import ProfileChain
from flexrank.progress import track
from flexrank.run import run_stages
from flexrank.run.config import load_config
from flexrank.run.deploying import deploy_plans, deploy_within, planner_for, plans_within
from flexrank.run.workspace import Workspace
from research.benches.bench import Bench
from research.benches.machine import forget_peak, in_fresh_process, interleave, resident_peak
from research.findings import Result, goal, table

#: Rounds in turn, at least, and about the least seconds of them; tokens that are generated after a prompt of so many.
REPEATS, SECONDS, NEW_TOKENS, PROMPT = 9, 2.0, 24, 32
#: A ratio up to this is as fast as the base: what two runs of one model differ by.
OVER_BASE = 1.02
#: Latencies that are asked for, over the base's; a ratio to what was asked up to this has kept to it.
ASKED, OVER_ASKED = (0.85, 0.7, 0.55), 1.05
BASE = "base"


def run(target: Path | None) -> Result:
    """Deploys every budget of a run, consolidated first where it was not, and measures each in turn with the base.

    Args:
        target: the run directory, or its config.
    """
    assert target is not None
    outcome = run_stages(load_config(target), "distill")
    if outcome.executed:  # this process's memory is in another state now than that of one that deploys
        found_there: Result = in_fresh_process(run, outcome.directory)
        return found_there
    work = outcome.workspace
    elastic, chain = work.elastic("elastic")
    planner = planner_for(work, elastic)
    base = copy.deepcopy(work.base).to(work.deployed_dtype)
    situations = _situations(work, base)
    found = [_measured(BASE, work, base, base, situations)]
    with work.directory.locked():  # the forms chosen are kept there
        for budget in track(work.config.allocation.budgets, "measuring sizes"):
            small, _ = deploy_within(work, planner, chain, Limits(budget))
            found.append(_measured(f"{budget:g}", work, small, base, situations))
        asked = list(_asked(work, planner, chain))
    return {
        "settings": {
            "model": work.config.model, "dtype": str(work.deployed_dtype), "forms": work.config.deployment.forms,
            "repeats": REPEATS, "seconds": SECONDS, "situations": [name for name, _, _ in situations],
        },
        "tables": [_ratio_table(found, situations), _size_table(found, situations), _asked_table(asked)],
        "claims": [*_goals(found), *_asked_goals(asked)],
        "data": {"found": found, "situations": [name for name, _, _ in situations], "asked": asked},
    }  # fmt: skip


Situation = tuple[str, int, Callable[[nn.Module], object]]  # its name, its tokens (or images), what is timed


def _situations(work: Workspace, base: Any) -> list[Situation]:
    """One sample and a batch of them; for language models that generate, decoding too."""
    example: Any = work.samples.example
    device = model_device(base)
    batches = [{key: value[:count].to(device) for key, value in example.items()} for count in (1, len(_first(example)))]
    found: list[Situation] = []
    for batch in batches:
        shape = _first(batch).shape
        plural = "" if shape[0] == 1 else "s"
        what = f"image{plural}" if "pixel_values" in batch else f"text{plural} of {shape[1]} tokens"
        tokens = shape[0] if "pixel_values" in batch else int(batch["attention_mask"].sum())
        found.append((f"{shape[0]} {what}", tokens, functools.partial(_forward, batch)))
    if work.config.task == "language" and callable(getattr(base, "generate", None)):
        prompt = {key: value[:1, :PROMPT] for key, value in batches[0].items()}
        found.append((f"{NEW_TOKENS} tokens generated", NEW_TOKENS, functools.partial(_generate, prompt)))
    return found


def _first(batch: Mapping[str, Any]) -> Any:
    return next(iter(batch.values()))


def _forward(batch: Batch, model: nn.Module) -> None:
    call_model(model, batch)
    _wait(model)


def _generate(prompt: Mapping[str, Any], model: Any) -> None:
    model.generate(**prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    _wait(model)


def _wait(model: nn.Module) -> None:
    if model_device(model).type == "cuda":
        torch.cuda.synchronize()


def _measured(
    name: str, work: Workspace, small: Any, base: nn.Module, situations: Sequence[Situation]
) -> dict[str, Any]:
    """Seconds, the ratio to the base's in turn, and the peak memory of loading and running it in a fresh process."""
    times = []
    with inference(small, base):
        for _, _, run_with in situations:
            runs = [functools.partial(run_with, model) for model in (small, base)]
            own, theirs = interleave(runs, _rounds(runs))
            ratio = statistics.median(one / other for one, other in zip(own, theirs, strict=True))
            times.append({"seconds": statistics.median(own), "ratio": 1.0 if name == BASE else ratio})
    example = {key: value.cpu() for key, value in dict(work.samples.example).items()}
    with tempfile.TemporaryDirectory() as scratch:
        models.save_model(small, Path(scratch))
        peak = in_fresh_process(_peak, scratch, work.config.task, str(work.deployed_dtype), example)
    size = sum(tensor.numel() * tensor.element_size() for tensor in small.state_dict().values())
    return {"name": name, "times": times, "bytes": size, "peak": peak}


def _rounds(runs: Sequence[Callable[[], object]]) -> int:
    """Short forwards are run more often: a few of them would all meet one moment of the machine."""
    once = sum(statistics.median(seconds) for seconds in interleave(runs, 3))
    return max(REPEATS, math.ceil(SECONDS / once))


@torch.inference_mode()
def _peak(directory: str, task: Any, dtype: str, batch: Batch) -> int:
    """Bytes of memory that loading the model, and then one forward, take at most beyond the libraries."""
    import transformers  # noqa: F401  # in memory before the count begins

    before = forget_peak()
    model = models.load_model(directory, task, dtype=getattr(torch, dtype.removeprefix("torch.")))
    call_model(model, batch)
    return resident_peak() - before


def _asked(work: Workspace, planner: Planner, chain: ProfileChain) -> Iterator[dict[str, Any]]:
    """The largest model within each latency of a batch: as deployed, or in the smallest forms by the table."""
    base, example = work.deployed_base, work.samples.example
    times = work.times or TimeTable(work.deployed_dtype, work.device)

    def in_smallest(limits: Limits) -> Plans:
        return fit(planner, time_chain(planner.model, base, example, chain, times), limits).plans

    ways: dict[str, Callable[[Limits], Plans]] = {
        "as deployed": functools.partial(plans_within, work, planner, chain, are_kept=False),
        "smallest forms": in_smallest,
    }
    for share, (way, plans_for) in track(list(itertools.product(ASKED, ways.items())), "asking for latencies"):
        milliseconds = 1e3 * seconds_of_forward(base, example)  # a machine's speed changes within minutes
        try:
            plans = plans_for(Limits(max_latency_ms=share * milliseconds))
        except FlexrankError as error:  # too small
            yield {"asked": share, "way": way, "ratio": None, "size": None, "quality": {}, "error": str(error)}
            continue
        small, _ = deploy_plans(work, planner.model, plans)
        ratio = latency_ratio(small, base, example, REPEATS, least_seconds=SECONDS)
        size = sum(plan.parameters for plan in plans.values()) / chain.dense_parameters
        yield {"asked": share, "way": way, "ratio": ratio, "size": size, "quality": work.judge(small)}


def _asked_table(asked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    qualities = list(dict.fromkeys(name for one in asked for name in one["quality"]))
    rows = [
        [f"{one['asked']:g}, {one['way']}", one["ratio"], one["size"], *map(one["quality"].get, qualities)]
        for one in asked
    ]  # fmt: skip
    title = "the largest model within a latency of a batch, over the base's"
    return table(title, ["asked", "measured", "layers' size", *qualities], rows)


def _asked_goals(asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    over = [one["ratio"] and one["ratio"] / one["asked"] for one in asked if one["way"] == "as deployed"]
    found = [ratio for ratio in over if ratio is not None]
    within = sum(ratio <= OVER_ASKED for ratio in found)
    here = f"worst {max(found):.2f}; {within} of {len(found)} within" if found else "none"
    here += f"; {len(over) - len(found)} out of reach" if len(found) < len(over) else ""
    holds = within == len(found) if found else None
    return [goal("time of a batch over the latency asked for", f"at most {OVER_ASKED}", here, holds)]


def _ratio_table(found: Sequence[Mapping[str, Any]], situations: Sequence[Situation]) -> dict[str, Any]:
    rows = [[one["name"], *(time["ratio"] for time in one["times"])] for one in found]
    return table("time over the base's, in turn", ["budget", *(name for name, _, _ in situations)], rows, digits=2)


def _size_table(found: Sequence[Mapping[str, Any]], situations: Sequence[Situation]) -> dict[str, Any]:
    columns = ["budget", "MB of weights", "MB at the peak"]
    columns += itertools.chain.from_iterable((f"ms, {name}", "a second") for name, _, _ in situations)
    rows = []
    for one in found:
        cells: list[Any] = [one["name"], one["bytes"] / 1e6, one["peak"] / 1e6]
        for (_, tokens, _), time in zip(situations, one["times"], strict=True):
            cells += [1e3 * time["seconds"], round(tokens / time["seconds"])]
        rows.append(cells)
    title = "weights, the most memory that a fresh process takes to load and run a batch, latency, tokens a second"
    return table(title, columns, rows, digits=1)


def _goals(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    ratios = [(time["ratio"], one["name"]) for one in found for time in one["times"] if one["name"] != BASE]
    worst = max(ratios)
    within = sum(ratio <= OVER_BASE for ratio, _ in ratios)
    here = f"worst {worst[0]:.2f} (at {worst[1]}); {within} of {len(ratios)} within"
    smallest, base = min(found[1:], key=lambda one: one["bytes"]), found[0]
    memory = f"{smallest['peak'] / base['peak']:.2f} at {smallest['name']}"
    return [
        goal("no size slower than the base, at any batch", f"at most {OVER_BASE}", here, within == len(ratios)),
        goal("the smallest size's peak memory over the base's", "below 1", memory, smallest["peak"] < base["peak"]),
    ]


def draw(data: Mapping[str, Any]) -> Any:
    """Time over the base's, by budget, a line a situation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.subplots()
    sizes = [one for one in data["found"] if one["name"] != BASE]
    budgets = [float(one["name"]) for one in sizes]
    for place, name in enumerate(data["situations"]):
        axes.plot(budgets, [one["times"][place]["ratio"] for one in sizes], marker="o", markersize=4, label=name)
    axes.axhline(1, color="#555555", linewidth=0.8)
    axes.set(xlabel="budget", ylabel="time over the base's", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


BENCH = Bench(
    name="model",
    title="Deployed models against their base",
    measures="latency, tokens a second and peak memory of every budget of a run, for a prompt and for decoding",
    minutes=4,
    run=run,
    draw=draw,
    takes="a run directory or its config",
    tried=("forms by parameters alone, under which small layers and large budgets were slower than the base",),
)
