"""The evidence: studies that repeat the paper, and benches of what the package costs. `python -m research --list`."""
