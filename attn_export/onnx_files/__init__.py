"""ONNX files of any exporter: whether they are sound, their sizes, inputs for them."""
