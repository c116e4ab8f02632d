"""Choose the next trial of a search: networks, hyperparameters, schedule. Needs no framework."""
