"""Attention written by hand: a softmax between two products, whatever stands between them."""
