"""Texts, images and batches, and how good a model is over them."""
