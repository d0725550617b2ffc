"""A run's deployed models: which profile is within a limit, their sizes and qualities, and how they are written."""

import dataclasses
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from flexrank.artefacts.elastic import load_components, read_shapes
from flexrank.calibrate import collect_rows
from flexrank.deployment import deploy, deployed_parameters_of, entry_within_latency, export, find_slack
from flexrank.deployment.limits import count_fitting, is_within, refuse
from flexrank.deployment.process import in_fresh_process
from flexrank.errors import FlexrankError
from flexrank.files import digest_json, directory_bytes, dtype_name, read_json
from flexrank.hf import models
from flexrank.nn.switch import footprint, nested_layers
from flexrank.profiles import ChainEntry, RankProfile, SlackTable
from flexrank.profiles.costs import Shape, profile_parameters, total_dense
from flexrank.refit import refit_
from flexrank.run.config import load_config
from flexrank.run.directory import RunDirectory
from flexrank.run.training import train_
from flexrank.run.workspace import Workspace

log = logging.getLogger("flexrank")


class Sizes:
    """The sizes of a run's elastic model, each as it is deployed. Only what a size needs is read, memory-mapped."""

    def __init__(self, work: Workspace):
        self.work, self._place = work, work.directory / "elastic"
        self.shapes, chain = read_shapes(self._place)
        least = load_components(self._place, chain.entries[0].profile)
        self.chain = dataclasses.replace(chain, footprint=footprint(least, work.deployed_dtype))
        self._slacks: dict[RankProfile, SlackTable] = {}
        self._own: nn.Module | None = None  # of the one size that was made by itself

    @classmethod
    def of_run(cls, directory: str | Path) -> "Sizes":
        """The sizes of the run in a directory."""
        return cls(Workspace(load_config(directory), RunDirectory(directory)))

    def slack_for(self, profile: RankProfile) -> SlackTable:
        """The run's slack; for a size of no requested budget it is chosen here, on the same rows."""
        path, stored = self.work.directory / "slack.json", None
        if path.is_file() and self._own is None:
            stored = SlackTable.from_json(read_json(path))
            if any(entry.profile == profile for entry in self.chain.requested):
                return stored
        if profile not in self._slacks:
            self._slacks[profile] = choose_slack(self.work, self.work.elastic("elastic")[0], [profile], stored)
        return self._slacks[profile]

    def deployed(self, profile: RankProfile) -> nn.Module:
        """The deployed model at this profile, in the dtype of deployment."""
        slack = self.slack_for(profile)  # may load the whole elastic model, and then frees it
        model = load_components(self._place, profile) if self._own is None else self._own
        return deploy(model, profile, dtype=self.work.deployed_dtype, device=self.work.device, slack=slack)

    def tune_(self, profile: RankProfile, steps: int, limits: Mapping[str, float]) -> Path:
        """Trains this size alone, from the elastic weights; it is then the only one that can be deployed.

        After an interruption the same call resumes from the checkpoint in RUN/tuning, whose path it returns. Raises
        FlexrankError if, with the slack of the new weights, the size exceeds `max_params` or `max_bytes`.
        """
        directory = self.work.directory
        name = digest_json([dict(profile), steps, directory.fingerprint_of("distill")])[:16]
        checkpoint = directory / "tuning" / name
        checkpoint.parent.mkdir(exist_ok=True)
        model, _ = self.work.elastic("elastic")
        rate = read_json(directory / "history.json")["learning_rate"]
        train_(self.work, model, [profile], steps, rate, checkpoint)
        self._deploy_only(model, profile, limits, "tuned")
        return checkpoint

    def refit_(self, profile: RankProfile, limits: Mapping[str, float]) -> None:
        """Fits this size alone, without training, from the decomposed weights; otherwise as `tune_`."""
        model, _ = self.work.elastic("elastic_initial")
        refit_(model, profile, self.work.base, self.work.samples.calibration)
        self._deploy_only(model, profile, limits, "refitted")

    def _deploy_only(self, model: nn.Module, profile: RankProfile, limits: Mapping[str, float], how: str) -> None:
        self._own, slack = model, choose_slack(self.work, model, [profile])
        self._slacks = {profile: slack}
        if not is_within(self.chain, parameters := slack.parameters(profile, self.shapes), limits):
            named = ", ".join(f"{name}={limit:g}" for name, limit in limits.items())
            raise FlexrankError(
                f"{how}, this size has {parameters} parameters in its layers, out of {named}; ask for less"
            )

    def within(self, limits: Mapping[str, float]) -> RankProfile:
        """The largest profile within the given limits, of `budget`, `max_params`, `max_bytes` and `max_latency_ms`."""
        latency, whole = limits.get("max_latency_ms"), limits.keys() & {"max_params", "max_bytes"}
        chain = self.chain.up_to(self.chain.entry_at(limits["budget"])) if "budget" in limits else self.chain
        entries = chain.entries
        if whole:
            entries = entries[: self._count_within(entries, {name: limits[name] for name in whole})]
        if latency is not None:  # in a fresh process: one that has trained measures wrong times
            chosen = in_fresh_process(find_within_latency, str(self.work.directory.path), len(entries), latency)
            entries = entries[: chosen + 1]
        parameters, trained, budgets = entries[-1].parameters, self.chain.requested, self.chain.budgets
        if not self.work.config.distillation.steps:  # nothing was trained, and no size is worse for it
            return entries[-1].profile
        if parameters > trained[-1].parameters:
            log.warning("this size exceeds the largest trained budget, %g: some parts are untrained", budgets[-1])
        if parameters < trained[0].parameters:
            log.warning("this size is below the smallest trained budget, %g: it was never trained", budgets[0])
        return entries[-1].profile

    def _count_within(self, entries: Sequence[ChainEntry], limits: Mapping[str, float]) -> int:
        """How many of the entries there are up to the largest whose deployed model is within the limits."""

        def fits(entry: ChainEntry) -> bool:
            if not is_within(self.chain, profile_parameters(entry.profile, self.shapes), limits):  # even without slack
                return False
            return is_within(self.chain, self._deployed_parameters(entry), limits)

        if not (count := count_fitting(entries, fits)):
            least = dataclasses.replace(entries[0], parameters=self._deployed_parameters(entries[0]))
            refuse(limits, self.chain.model_parameters(least), self.chain.model_bytes(least))
        return count

    def _deployed_parameters(self, entry: ChainEntry) -> int:
        return self.slack_for(entry.profile).parameters(entry.profile, self.shapes)


def choose_slack(
    work: Workspace, model: nn.Module, profiles: Iterable[Mapping[str, int]], known: SlackTable | None = None
) -> SlackTable:
    """Chooses slack by the run's settings, on calibration rows, so the dtype's bound holds on real inputs."""
    slack = work.config.deployment.slack
    rows = collect_rows(model, work.samples.calibration, nested_layers(model)) if slack == "auto" else None
    return find_slack(model, profiles, dtype=work.deployed_dtype, slack=slack, activations=rows, known=known)


def find_within_latency(directory: str, count: int, max_latency_ms: float) -> int:
    """The index of the largest of the chain's first `count` entries within a latency on the run's example batch."""
    sizes = Sizes.of_run(directory)
    entries = sizes.chain.entries[:count]
    entry = entry_within_latency(
        entries,
        lambda one: sizes.deployed(one.profile),
        sizes.work.deployed_base,
        sizes.work.samples.example,
        max_latency_ms,
    )
    return entries.index(entry)


def export_size(sizes: Sizes, small: nn.Module, profile: RankProfile, place: Path) -> dict[str, Any]:
    """Exports a deployed model, verified in a fresh process; returns its directory and sizes."""
    work = sizes.work
    export(small, place, work.samples.example, tokenizer=work.saved_tokenizer)
    return {
        "directory": str(place),
        **count_parameters(small, profile, sizes.shapes),
        "bytes": directory_bytes(place),
        "dtype": dtype_name(work.deployed_dtype),
    }


def measure_size(small: Any, profile: Mapping[str, int], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Ranks, parameters, and bytes on disk (weights and config, as saved) of a deployed model."""
    with tempfile.TemporaryDirectory() as scratch:
        models.save_model(small, Path(scratch))
        size = directory_bytes(scratch)
    return {**count_parameters(small, profile, shapes), "bytes": size}


def count_parameters(small: nn.Module, profile: Mapping[str, int], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The mean rank, and the parameters that the deployed model has."""
    fractions = [rank / min(shapes[name]) for name, rank in profile.items()]
    in_layers = deployed_parameters_of(small, profile)
    return {
        "relative_size": in_layers / total_dense(shapes),
        "mean_rank": sum(profile.values()) / len(profile),
        "mean_rank_fraction": sum(fractions) / len(fractions),
        "params_layers": in_layers,
        "params_model": sum(parameter.numel() for parameter in small.parameters()),
    }
