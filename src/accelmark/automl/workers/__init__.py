"""Workers that run trials: Ray actors on one machine or a cluster."""
