"""``accelmark check``: conformance of cases and vendors, equivalence of frameworks."""
