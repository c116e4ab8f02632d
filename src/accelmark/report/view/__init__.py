"""Web pages over a directory of runs: list, live progress, comparison, scaling, trend."""
