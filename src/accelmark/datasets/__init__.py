"""Fetch data sets and weights, verify them by hash, and cache them."""

from accelmark.datasets.cache import CACHE_VARIABLE, cache_directory
from accelmark.datasets.ensure import ensure, locate
from accelmark.datasets.progress import Progress
from accelmark.datasets.spec import DatasetSpec, FileSpec, TreePart, dataset_specs, load_dataset_specs
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
    "load_dataset_specs",
    "locate",
    "verify",
]
