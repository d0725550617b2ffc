"""Checks that a run of examples/minilm.yaml wrote what the README promises: `check_summary.py RUN BUDGET...`."""

import json
import math
import sys
from pathlib import Path

KEYS = ("budget", "params_layers", "params_model", "bytes", "quality", "latency_ratio")


def main(run: Path, budgets: list[float]) -> None:
    """Raises AssertionError at the first thing that is missing or not a number."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf8"))
    rows = summary["rows"]
    assert sorted(row["budget"] for row in rows) == sorted(budgets), [row["budget"] for row in rows]
    for row in rows:
        missing = [key for key in KEYS if key not in row]
        assert not missing, f"budget {row['budget']}: no {missing}"
        assert {"cosine", "mrr"} <= row["quality"].keys(), row["quality"]
        assert all(math.isfinite(value) for value in (*row["quality"].values(), row["latency_ratio"]))
        assert row["params_model"] < summary["base"]["params_model"]
        assert row["bytes"] < summary["base"]["bytes"]
    largest = max(rows, key=lambda row: row["budget"])
    assert largest["quality"]["cosine"] > 0.8, f"cosine {largest['quality']['cosine']} at {largest['budget']}"
    for entry in summary["deployed"]:
        assert (run / entry["directory"] / "model.safetensors").is_file(), entry


if __name__ == "__main__":
    main(Path(sys.argv[1]), [float(budget) for budget in sys.argv[2:]])
