"""Decide what a search tries next: networks, hyperparameters, schedule. Needs no framework."""
