"""Convert FlagPerf's configuration files to AccelMark's, without executing them."""

from accelmark.compat.flagperf.convert import Converted, convert

__all__ = ["Converted", "convert"]
