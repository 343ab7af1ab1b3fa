"""Measure what a bundle's graphs could be, and keep the fastest that gives PyTorch's answers."""
