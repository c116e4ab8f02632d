"""MLCommons LoadGen: it decides when queries are issued and whether a run is valid; the client sends them."""
