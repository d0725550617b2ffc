"""The evidence for flexrank: studies of the paper, benchmarks, baselines. Run `python -m research --list`."""
