"""FlagPerf's configuration files, read without executing them, as AccelMark's."""

from accelmark.plan.flagperf.convert import Converted, convert

__all__ = ["Converted", "convert"]
