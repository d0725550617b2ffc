"""The stages of a run: what each reads, which library functions it calls, and what it writes.

A stage reads the configuration and the files of the stages it needs, and writes files of the run directory. In memory,
stages share only what could be read again from a file, bit for bit.
"""

import logging
from typing import Any

import torch

from flexrank import processes
from flexrank.allocate import allocate_ranks
from flexrank.artefacts.elastic import read_elastic_document, read_shapes, save_elastic
from flexrank.artefacts.tensors import open_tensors, write_tensors
from flexrank.calibrate import LayerMoment
from flexrank.decompose import decompose_to_disk
from flexrank.deployment.process import in_fresh_process
from flexrank.distill import distillation_evaluator
from flexrank.files import atomic_file, read_json, remove_artefact, write_json
from flexrank.hf.classes import auto_class
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.experts import separate_experts_
from flexrank.nn.matrix import matrix_shape
from flexrank.nn.select import select_layers
from flexrank.nn.sharding import is_sharded
from flexrank.nn.switch import layer_shapes, use_profile
from flexrank.probe import curvature_rises, curvature_table, probe_sensitivity
from flexrank.profiles import ProfileChain, SensitivityTable
from flexrank.profiles.costs import full_ranks
from flexrank.progress import track
from flexrank.run import report
from flexrank.run.candidates import candidate_ranks, rank_constraints, require_reachable_budgets
from flexrank.run.cards import write_cards
from flexrank.run.fitting import require_fitting_inputs
from flexrank.run.measure import latency_ratios
from flexrank.run.samples import loss_rows
from flexrank.run.sizes import Sizes, choose_slack, export_size, measure_size
from flexrank.run.tracking import LOSSES, tracked
from flexrank.run.training import log_degraded_sizes, probe_losses, train_
from flexrank.run.trials import choose_rate
from flexrank.run.workspace import Workspace

#: Written with `probe.method: curvature`: each layer's rise of the loss at ranks 0 … k.
CURVATURE = "curvature.safetensors"
log = logging.getLogger("flexrank")


def decompose(work: Workspace, _: str) -> None:
    """Calibrates and decomposes: writes RUN/elastic_initial, whose chain is the full model alone.

    With `probe.method: curvature` it also writes RUN/curvature.safetensors: each layer's rise of the loss at every
    rank, computed while the layer's moments are in memory.
    """
    model, settings = work.load_base(), work.config.decomposition
    require_fitting_inputs(work, model)
    separate_experts_(model)
    layers = select_layers(model, work.config.layers.include, work.config.layers.exclude)
    shapes = {name: matrix_shape(layer) for name, layer in layers.items()}
    require_reachable_budgets(work.config, shapes)
    del layers  # a reference would keep each layer in memory beside its elastic form
    batches, is_curved = work.samples.calibration, work.config.probe.method == "curvature"
    rows = loss_rows(work.config.task, batches)
    rises = {name: torch.zeros(min(shape) + 1, dtype=torch.float64) for name, shape in shapes.items()}

    def add_rises(name: str, layer: NestedLayer, moment: LayerMoment) -> None:
        rises[name] = curvature_rises(name, layer, moment, rows)

    decompose_to_disk(
        model,
        batches,
        shapes,
        work.directory / "elastic_initial",
        method=settings.method,
        side="input" if work.config.keeps_input_moments else "smaller",
        gradient_loss=work.objective().fisher_loss if work.config.keeps_gradient_moments else None,
        device=work.device,
        dtype=getattr(torch, work.config.dtype),
        state_bytes=settings.buffer_bytes,
        shard_bytes=work.shard_bytes,
        on_layer=add_rises if is_curved else None,
        tokenizer=work.saved_tokenizer,
    )
    # The other processes wait until it is gone.
    processes.on_first_process(lambda: (work.directory / CURVATURE).unlink(missing_ok=True))
    if is_curved:
        processes.sum_(rises.values())  # each process holds those of the layers it decomposed
        if processes.is_first():
            with atomic_file(work.directory / CURVATURE) as aside:
                write_tensors(aside, rises)


def probe(work: Workspace, fingerprint: str) -> None:
    """Probes each layer: writes RUN/sensitivity.json. Layers already probed survive an interruption."""
    if work.config.probe.method == "curvature":
        _write_shared(work, "sensitivity.json", _curvature(work).to_json())
        return
    model, _ = work.elastic("elastic_initial")
    require_reachable_budgets(work.config, layer_shapes(model))
    evaluate = distillation_evaluator(work.base, work.samples.probe, work.probe_objective)
    table = probe_sensitivity(
        model,
        evaluate,
        work.config.probe.levels,
        spacing=work.config.probe.spacing,
        checkpoint=work.directory.partial("probe", fingerprint, ".json"),
        replay_bytes=work.config.probe.replay_bytes,
        **rank_constraints(work.config),
    )
    _write_shared(work, "sensitivity.json", table.to_json())


def _write_shared(work: Workspace, name: str, value: Any) -> None:
    """Writes a value that all processes hold, from process 0 alone."""
    if processes.is_first():
        write_json(work.directory / name, value)


def _curvature(work: Workspace) -> SensitivityTable:
    """The sensitivity table from RUN/curvature.safetensors; the model's weights are not read."""
    shapes, chain = read_shapes(work.directory / "elastic_initial")
    ranks = candidate_ranks(work.config, shapes)
    with open_tensors(work.directory / CURVATURE) as file:
        return curvature_table({name: file.get_tensor(name) for name in ranks}, shapes, ranks, chain.footprint)


def allocate(work: Workspace, _: str) -> None:
    """Chooses the ranks for every budget: writes RUN/chain.json."""
    settings, table = work.config.allocation, read_table(work)
    require_reachable_budgets(work.config, table.shapes)
    chain = allocate_ranks(
        table, settings.budgets, method=settings.method, savings=settings.savings, **rank_constraints(work.config)
    )
    write_json(work.directory / "chain.json", chain.to_json())


def distill(work: Workspace, fingerprint: str) -> None:
    """Consolidates: writes RUN/elastic, one artefact of every size, and RUN/history.json; as it goes, losses.jsonl."""
    settings, chain = work.config.distillation, read_chain(work)
    profiles, budgets = [entry.profile for entry in chain.requested], list(chain.budgets)
    weights = None if settings.weights is None else settings.weights[::-1]  # the chain's budgets rise
    rate = choose_rate(work, chain, fingerprint, weights)
    history: dict[str, Any] = {"learning_rate": rate, "steps": 0, "losses": [], "budgets": []}
    with work.student(profiles) as model:
        if processes.is_first() and not settings.steps:
            (work.directory / LOSSES).unlink(missing_ok=True)  # from an earlier configuration
        if settings.steps:
            before = probe_losses(work, model, profiles)
            checkpoint = work.directory.partial("distill", fingerprint)
            with tracked(work.directory.path, budgets, settings.tracking) as on_step:
                done = train_(work, model, chain, settings.steps, rate, checkpoint, weights, on_step)
            log_degraded_sizes(budgets, before, probe_losses(work, model, profiles))
            drawn = [budgets[index] for index in done.profiles]
            history |= {"steps": done.steps, "losses": done.losses, "budgets": drawn}
        if processes.is_first() or is_sharded(model):
            place = work.directory / "elastic"
            options = {"tokenizer": work.saved_tokenizer, "deployed_dtype": work.narrow_dtype}
            save_elastic(model, chain, place, **options, shard_bytes=work.shard_bytes)
    _write_shared(work, "history.json", history)


def slack(work: Workspace, _: str) -> None:
    """Chooses every layer's slack at its ranks in the requested budgets: writes RUN/slack.json."""
    model, chain = work.elastic("elastic")
    table, shapes = choose_slack(work, model, [entry.profile for entry in chain.requested]), layer_shapes(model)
    for budget, entry in zip(chain.budgets, chain.requested, strict=True):
        if (share := table.parameters(entry.profile, shapes) / chain.dense_parameters) > budget + 0.005:
            log.warning("slack: size %g has %.3f of the dense parameters: more slack than was counted", budget, share)
    write_json(work.directory / "slack.json", table.to_json())


def evaluate_initial(work: Workspace, _: str) -> None:
    """Writes the qualities before consolidation to RUN/evaluation_initial.json; no rows if nothing is consolidated.

    They are measured in the dtype of deployed models, as those after it, or else rounding would count as training.
    """
    budgets, own = work.config.allocation.budgets, dict[int, Any]()
    if work.config.distillation.steps:
        chain = read_chain(work)
        model = work.decomposed(chain.at(max(budgets)))
        for number in track(processes.share(len(budgets)), "evaluating before consolidation"):
            with use_profile(model, chain.at(budgets[number])):
                own[number] = {"budget": budgets[number], "quality": work.measure_quality(model)}
    rows = list(processes.gather_merged(own).values())
    _write_shared(work, "evaluation_initial.json", {"rows": rows})


def evaluate(work: Workspace, _: str) -> None:
    """Writes RUN/evaluation.json: size, qualities and latency of the deployed model at each budget, and of the base."""
    budgets, ratios = work.config.allocation.budgets, [None] * len(work.config.allocation.budgets)
    if work.config.evaluation.latency:
        work.free_base()
        ratios = processes.on_first_process(lambda: in_fresh_process(latency_ratios, str(work.directory.path)))
    sizes, own = Sizes(work), dict[int, Any]()
    shapes = sizes.shapes
    for number in track(processes.share(len(budgets) + 1), "evaluating"):
        if number == len(budgets):
            row = measure_size(work.deployed_base, full_ranks(shapes), shapes)
            own[number] = {**row, "quality": work.measure_quality(work.base)}
            continue
        profile = sizes.chain.at(budgets[number])
        small = sizes.deployed(profile)
        row = {"budget": budgets[number], **measure_size(small, profile, shapes)}
        row |= {"quality": work.measure_quality(small), "latency_ratio": ratios[number], "ranks": dict(profile)}
        own[number] = row
        del small  # before the next one is made
    *rows, base = processes.gather_merged(own).values()
    layers = {name: {"shape": list(shape)} for name, shape in shapes.items()}
    _write_shared(work, "evaluation.json", {"base": base, "rows": rows, "layers": layers})


def export_all(work: Workspace, _: str) -> list[str]:
    """Exports each deployment budget to RUN/deployed/BUDGET, verified in a fresh process; returns the directories.

    What this stage has exported for other budgets is removed.
    """
    place, exports, document = work.directory / "deployed", [], work.directory / "deployed.json"
    place.mkdir(exist_ok=True)
    earlier = read_json(document) if document.is_file() else []
    measure_quality, sizes = work.measure_quality, Sizes(work)
    work.free_base()
    profiles = {budget: sizes.within({"budget": budget}) for budget in work.config.deployed_budgets}
    for budget, profile in profiles.items():
        name = f"{budget:.2f}" if round(budget, 2) == budget else f"{budget!r}"
        small = sizes.deployed(profile)
        entry = export_size(sizes, small, profile, place / name)
        exports.append({"budget": budget, **entry, "directory": f"deployed/{name}", "quality": measure_quality(small)})
        write_json(document, exports + earlier)  # if this run is killed, the next one knows what was exported
        del small  # before the next one is made
    places = [entry["directory"] for entry in exports]
    for other in {entry["directory"] for entry in earlier} - set(places):
        if (work.directory / other / "flexrank.json").is_file():
            log.info("deploy: removed %s, as deployment.budgets has it no more", work.directory / other)
            remove_artefact(work.directory / other)
    write_json(document, exports)
    return places


def summarise(work: Workspace, _: str) -> None:
    """Joins the stages' measurements into RUN/summary.json, writes the artefacts' cards, draws figures and page."""
    before = {row["budget"]: row["quality"] for row in read_json(work.directory / "evaluation_initial.json")["rows"]}
    evaluation, chain, table = read_json(work.directory / "evaluation.json"), read_chain(work), read_table(work)
    rows = [
        {**row, "quality_before": before.get(row["budget"]), "predicted_error": table.predicted_error(row["ranks"])}
        for row in evaluation["rows"]
    ]
    summary = {
        "name": work.config.name,
        "model": work.config.model,
        "task": work.config.task,
        "auto_class": auto_class(read_elastic_document(work.directory / "elastic")["class"]),
        "base": evaluation["base"],
        "rows": rows,
        "layers": evaluation["layers"],
        "decomposition": {"method": work.config.decomposition.method},
        "allocation": {"method": chain.method, "gap": chain.gap},
        "distillation": {"steps": work.config.distillation.steps},
        "deployed": read_json(work.directory / "deployed.json"),
        "seconds": work.directory.seconds(),
    }
    write_json(work.directory / "summary.json", summary)
    write_cards(work.directory.path, summary)
    report.write_report(work.directory.path)


def read_chain(work: Workspace) -> ProfileChain:
    """The chain in RUN/chain.json."""
    return ProfileChain.from_json(read_json(work.directory / "chain.json"))


def read_table(work: Workspace) -> SensitivityTable:
    """The probe's errors in RUN/sensitivity.json."""
    return SensitivityTable.from_json(read_json(work.directory / "sensitivity.json"))
