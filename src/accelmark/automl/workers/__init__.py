"""Workers that run trials: threads of this process, or Ray actors on one machine or a cluster."""
