"""The limits of `flexrank deploy`: numbers with units, and what is no limit."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from flexrank.errors import FlexrankError

#: What a number is multiplied by; a B for bytes may follow.
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_count(text: str) -> int:
    """A whole number, in full or with a unit: 200000000, 200MB, 190.7MiB or 1.5M; fractions are rounded down."""
    match = re.fullmatch(r"(-?[\d_]*\.?\d+(?:e\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise FlexrankError(f"{text!r} is no number of bytes or parameters; 200000000, 200MB, 190.7MiB and 1.5M are")
    return math.floor(float(match[1]) * UNITS[match[2] or ""])


def check_limits(limits: Mapping[str, float], output: Path | None, tune: int) -> None:
    """Refuses a wrong limit, a place or tuning without one, and a place that holds anything but a deployed model."""
    if tune < 0:
        raise FlexrankError(f"--tune is {tune}; it is a number of steps, 0 or more")
    for name, limit in limits.items():
        if not 0 < limit < math.inf or (name == "budget" and limit > 1):
            right = "a fraction in (0, 1]" if name == "budget" else "a finite number above 0"
            raise FlexrankError(f"--{name.replace('_', '-')} is {limit}; it is {right}")
    for option, is_given in {"--output": output is not None, "--tune": tune > 0}.items():
        if is_given and not limits:
            raise FlexrankError(f"{option} needs --budget, --max-bytes, --max-params or --max-latency-ms")
    if output is not None and output.exists() and not (output / "flexrank.json").is_file():
        if not output.is_dir() or any(output.iterdir()):
            raise FlexrankError(f"--output {output}: exists and is not a deployed model; only such a one is replaced")
