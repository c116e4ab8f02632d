"""Searched networks as data: layers, shapes, operation counts, morphs and weight transfer. Needs numpy only."""
