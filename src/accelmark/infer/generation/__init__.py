"""Offline generation: a language model in an engine, measured with the load, records and figures of serving."""
