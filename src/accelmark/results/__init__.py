"""Results: read raw records, compute figures, aggregate them over rounds, and store them."""
