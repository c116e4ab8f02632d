"""Plan a run: resolve a run file to jobs with settings and commands, before anything starts."""
