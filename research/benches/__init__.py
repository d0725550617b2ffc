"""What the package costs and gives, one module for each bench, as `EXPERIMENT`."""
