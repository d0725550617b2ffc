"""Runs a configuration: stages that write one run directory, each skipped while it is up to date."""

from flexrank.run.runner import Outcome, export_one, run_stages, stage_names

__all__ = ["Outcome", "export_one", "run_stages", "stage_names"]
