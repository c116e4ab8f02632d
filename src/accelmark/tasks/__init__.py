"""Tasks: a folder for each family, with a file for each framework, and data without a framework."""
