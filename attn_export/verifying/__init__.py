"""Whether a bundle or a file gives the answers of PyTorch, of a file or of another bundle."""
