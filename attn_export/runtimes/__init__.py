"""What runs a model: one file a runtime. Nothing here imports torch, except torch's own file."""
