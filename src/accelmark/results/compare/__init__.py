"""Compare results: differences with confidence intervals, tables, SQL, trends."""
