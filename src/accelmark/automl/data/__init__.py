"""Pictures for a search: what it trains on, what it validates on, and what it never sees."""

from accelmark.automl.data.dataset import Dataset, open_dataset
from accelmark.automl.data.pictures import ArrayPictures, Pictures

__all__ = ["ArrayPictures", "Dataset", "Pictures", "open_dataset"]
