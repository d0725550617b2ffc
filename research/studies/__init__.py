"""The paper's evidence, one module a figure or table of it: `flexrank reproduce NAME`.

A module holds its study as `STUDY`: what it shows, what the paper says, how it runs, and how its figure is drawn from
the saved JSON alone.
"""

import importlib
from typing import Any

from flexrank.errors import FlexrankError

#: In the order in which the paper tells them.
NAMES = (
    "theory", "ranking", "front", "lm-profiles", "calibration-size", "layerwise", "joint-vs-single", "equal-budget",
    "vision", "adaptation", "gar",
)  # fmt: skip


def find_study(name: str) -> Any:
    """The `study.Study` of this name.

    Raises:
        FlexrankError: there is none.
    """
    if name not in NAMES:
        raise FlexrankError(f"study {name!r} is unknown; it is one of {', '.join(NAMES)}")
    return importlib.import_module(f"research.studies.{name.replace('-', '_')}").STUDY
