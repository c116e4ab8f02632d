"""How a node agent is started, followed and ended on a host: here, over SSH, or by Slurm."""
