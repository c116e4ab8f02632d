"""Virtual environments of frameworks: one for each; ranks run in it while the node agent keeps its own Python."""
