"""The ranks that a run chooses among, and whether its budgets can be met with them."""

import math
from collections.abc import Mapping
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.profiles.costs import SLACK_SHARE, Shape, expected_parameters, rank_levels, total_dense
from flexrank.run.config import RunConfig


def rank_constraints(config: RunConfig) -> dict[str, Any]:
    """`min_saving` and `slack_share`; the paper's algorithm as printed leaves no rank out and counts no slack."""
    is_printed = config.allocation.method == "paper"
    has_slack = config.deployment.slack != 0 and not is_printed
    return {
        "min_saving": 0.0 if is_printed else config.allocation.min_saving,
        "slack_share": SLACK_SHARE if has_slack else 0.0,
    }


def candidate_ranks(config: RunConfig, shapes: Mapping[str, Shape]) -> dict[str, tuple[int, ...]]:
    """The probed ranks of each layer, rising to full rank."""
    probe, constraints = config.probe, rank_constraints(config)
    return {name: rank_levels(shape, probe.levels, probe.spacing, **constraints) for name, shape in shapes.items()}


def require_reachable_budgets(config: RunConfig, shapes: Mapping[str, Shape]) -> None:
    """Refuses, before hours of work, a budget below the cost of the smallest candidates.

    Raises:
        FlexrankError: a budget is too small; the message names it and the least possible one.
    """
    share = rank_constraints(config)["slack_share"]
    ranks = candidate_ranks(config, shapes)
    cheapest = sum(expected_parameters(shape, ranks[name][0], share) for name, shape in shapes.items())
    least = cheapest / total_dense(shapes)
    for key, budgets in (("allocation", config.allocation.budgets), ("deployment", config.deployed_budgets)):
        smallest = min(budgets, default=1.0)
        if smallest < least:
            right = f"with probe.levels {config.probe.levels} the least is {math.ceil(1e4 * least) / 1e4}"
            raise FlexrankError(f"{key}.budgets: {smallest} is too small; {right}")
