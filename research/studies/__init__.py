"""The paper's evidence: one module for each of its figures or tables, with its `EXPERIMENT`, and what they share."""
