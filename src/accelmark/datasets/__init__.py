"""Fetch data sets and weights, verify them by hash, and cache them."""

from accelmark.datasets.ensure import CACHE_VARIABLE, cache_directory, ensure, locate
from accelmark.datasets.progress import Progress
from accelmark.datasets.spec import DatasetSpec, FileSpec, TreePart, dataset_specs
from accelmark.datasets.verify import fingerprint, verify

__all__ = [
    "CACHE_VARIABLE",
    "DatasetSpec",
    "FileSpec",
    "Progress",
    "TreePart",
    "cache_directory",
    "dataset_specs",
    "ensure",
    "fingerprint",
    "locate",
    "verify",
]
