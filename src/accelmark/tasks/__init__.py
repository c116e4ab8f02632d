"""Tasks: a folder for each family, with data and metrics without a framework, and a file for each framework."""
