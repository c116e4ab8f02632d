"""The load: when requests are due, how long they are, their prompts, and the search for the highest rate."""
