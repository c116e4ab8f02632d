"""What was measured: reading raw records, figures, aggregation over rounds, and the files that hold them."""
