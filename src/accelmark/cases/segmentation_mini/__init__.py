"""Semantic segmentation of canvases of Fashion-MNIST's items."""
