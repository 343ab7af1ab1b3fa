"""Reference PyTorch models: plain modules that import torch and nothing else of this package."""
