"""Elastic and deployed layers, a layer as its matrix, and how a model's layers are replaced and switched."""
