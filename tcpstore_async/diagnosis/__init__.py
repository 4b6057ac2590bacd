"""Conclusions from the facts of a server: which ranks are missing, and which keys are similar to awaited ones."""
