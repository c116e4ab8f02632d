"""The report of a search: one HTML page, JSON and CSV."""

from accelmark.report.automl.write import write_report

__all__ = ["write_report"]
