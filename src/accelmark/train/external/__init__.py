"""Ranks of other projects' trainers, whose output is translated into PerfLog events."""
