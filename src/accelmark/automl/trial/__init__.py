"""One trial: the order it is given, what it reports, and the loop that trains it."""
