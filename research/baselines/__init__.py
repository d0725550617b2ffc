"""Rivals of flexrank, to compare with."""
