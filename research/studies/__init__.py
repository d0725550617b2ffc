"""The paper's evidence, one module for each figure or table of it, as `EXPERIMENT`; and what these share."""
