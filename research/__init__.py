"""The evidence: studies that reproduce the paper and benches that measure the package. `python -m research --list`."""
