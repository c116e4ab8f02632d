"""Classification of the nodes of graphs."""
