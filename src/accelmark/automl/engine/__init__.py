"""The engine of a search: the coordinator, its durable journal, and the workers that it drives."""
