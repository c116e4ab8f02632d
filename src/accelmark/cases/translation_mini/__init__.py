"""A small Transformer that translates the names of languages."""
