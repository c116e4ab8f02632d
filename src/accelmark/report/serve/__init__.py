"""A page over many runs, for a team: read-only, on this machine unless told otherwise."""
