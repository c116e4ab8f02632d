"""Fetch data sets and weights, verify them by hash, and cache them."""
