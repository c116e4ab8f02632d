"""The coordinator: takes the jobs of a plan through their states."""
