"""What a run's journal is held against: its data, its own clock, and what it was asked for.

Each check returns the contradictions that it found, as sentences for people.
"""

from accelmark.automl.evidence.request import against_request
from accelmark.automl.evidence.times import against_clock
from accelmark.automl.evidence.work import against_data

__all__ = ["against_clock", "against_data", "against_request"]
