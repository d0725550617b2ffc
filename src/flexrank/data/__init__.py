"""Texts, images and batches, and metrics of a model over them."""
