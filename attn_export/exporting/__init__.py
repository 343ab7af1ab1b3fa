"""A PyTorch model, as an ONNX graph whose attention is still to be fused."""
