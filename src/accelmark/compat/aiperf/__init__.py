"""AIPerf's ``config.yml``."""

from accelmark.compat.aiperf.config import is_aiperf, read_aiperf

__all__ = ["is_aiperf", "read_aiperf"]
