"""`flexrank deploy` for an elastic artefact without its run directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexrank import processes
from flexrank.cli.printing import show_path, show_size
from flexrank.errors import FlexrankError


def deploy_elastic(
    directory: Path, limits: Mapping[str, Any], output: Path | None, needs_run: bool, as_json: bool
) -> None:
    """Exports the largest size within the limits, to DIR-LIMITS by default; logs its sizes and prints its path."""
    from flexrank.run.cut import cut

    if needs_run or "max_latency_ms" in limits:
        raise FlexrankError(
            f"{directory}: an elastic artefact; --set, --tune, --refit and --max-latency-ms need its run"
        )
    if not limits:
        raise FlexrankError(f"{directory}: an elastic artefact; give --budget, --max-bytes or --max-params")
    name = "-".join(f"{key}-{limit}" for key, limit in limits.items())
    place = output or sibling_path(directory, name)
    exported = processes.on_first_process(lambda: cut(directory, place, **limits))
    show_size(exported)
    show_path(place, exported, as_json)


def sibling_path(directory: Path, ending: str) -> Path:
    """The path DIR-ENDING; `.` and `..`, which have no name of their own, are resolved first."""
    named = directory if directory.name not in ("", "..") else directory.resolve()
    return named.with_name(f"{named.name}-{ending}")
