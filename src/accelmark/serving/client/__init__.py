"""Client of streaming completions: connections, processes that share a load, and the record of each request."""
