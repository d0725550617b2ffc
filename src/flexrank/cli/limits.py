"""The limits of `flexrank deploy`: parses numbers with units, and refuses invalid limits."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from flexrank.errors import FlexrankError

#: The factor of each unit: B is a billion for parameters, and a byte for bytes.
PARAMETERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """Parses a number of bytes, such as 200000000, 200MB or 190.7MiB."""
    return _parsed(text, BYTES, "bytes", "200000000, 200MB and 190.7MiB")


def parse_parameters(text: str) -> int:
    """Parses a number of parameters, such as 1500000, 1.5M or 7B."""
    return _parsed(text, PARAMETERS, "parameters", "1500000, 1.5M and 7B")


def _parsed(text: str, units: Mapping[str, int], what: str, right: str) -> int:
    """The number times its unit, rounded down to an integer; exact, however large."""
    match = re.fullmatch(r"(-?(?:\d+(?:_\d+)*(?:\.\d+)?|\.\d+))\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise FlexrankError(f"{text!r} is not a number of {what}, such as {right}")
    return math.floor(Fraction(match[1]) * units[match[2]])


def check_limits(limits: Mapping[str, float], output: Path | None, tune: int, refit: bool) -> None:
    """Refuses an invalid limit, an option without a limit, --tune with --refit, and an output it may not replace."""
    if tune < 0:
        raise FlexrankError(f"--tune is {tune}; it is a number of steps, 0 or more")
    if tune and refit:
        raise FlexrankError("--tune trains the size and --refit fits it without training; give one of them")
    for name, limit in limits.items():
        if not 0 < limit < math.inf or (name == "budget" and limit > 1):
            right = "a fraction in (0, 1]" if name == "budget" else "a finite number above 0"
            raise FlexrankError(f"--{name.replace('_', '-')} is {limit}; it is {right}")
    for option, is_given in {"--output": output is not None, "--tune": tune > 0, "--refit": refit}.items():
        if is_given and not limits:
            raise FlexrankError(f"{option} needs --budget, --max-bytes, --max-params or --max-latency-ms")
    if output is not None and output.exists() and not (output / "flexrank.json").is_file():
        if not output.is_dir() or any(output.iterdir()):
            raise FlexrankError(f"--output {output}: exists and is not a deployed model, so it is not replaced")
