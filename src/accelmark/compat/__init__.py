"""Formats of FlagPerf and AIPerf."""
