"""FlagPerf's configuration files, read without executing them, as AccelMark's."""

from accelmark.compat.flagperf.convert import Converted, convert

__all__ = ["Converted", "convert"]
