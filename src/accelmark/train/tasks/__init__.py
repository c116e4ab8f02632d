"""Task families without a framework: shares of data sets, and metrics."""
