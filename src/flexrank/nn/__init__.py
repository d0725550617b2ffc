"""Elastic and deployed layers, a layer as its matrix, and how a model is rebuilt from them."""
