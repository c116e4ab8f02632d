"""Launch through Slurm."""
