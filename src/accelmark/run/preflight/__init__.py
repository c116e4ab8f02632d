"""Preflight: check every host of a cluster before anything is started, and report all problems in one table."""
