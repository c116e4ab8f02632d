"""Showing what was measured: one self-contained page a run, and tables for README files."""
