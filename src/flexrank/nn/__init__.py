"""Elastic and deployed layers, the matrix of a layer, and functions that replace and switch a model's layers."""
