"""Measurements of single stages: one module each, `flexrank bench NAME`."""
