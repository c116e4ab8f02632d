"""Captions of canvases with items of Fashion-MNIST."""
