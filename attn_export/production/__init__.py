"""Serving a bundle from Python: choose a runtime, check inputs, run from many threads."""
