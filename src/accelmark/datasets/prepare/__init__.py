"""Data sets in AccelMark's layout from the archives in which they are published, one file for each kind."""
