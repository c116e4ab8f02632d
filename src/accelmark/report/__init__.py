"""Reports: a self-contained page for each run or comparison, tables, and web pages over many runs."""
