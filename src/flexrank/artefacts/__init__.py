"""Elastic and deployed models on disk."""
