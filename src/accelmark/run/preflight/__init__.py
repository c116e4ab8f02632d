"""Looking at every host of a cluster before anything starts: all problems of all hosts, in one table."""
