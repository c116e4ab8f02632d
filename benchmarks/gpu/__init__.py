"""Measurements on an accelerator, in calls of at most eight minutes; see README.md beside this file."""
