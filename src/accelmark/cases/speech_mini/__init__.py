"""Speech recognition on the recorded prompts of a telephone system."""
