"""Virtual environments of frameworks: one each, in which ranks run while the node agent keeps its own Python."""
