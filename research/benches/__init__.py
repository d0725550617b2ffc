"""What the package costs and gives: one module for each bench, with its `EXPERIMENT`."""
