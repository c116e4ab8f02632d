"""What a search is asked for: our own typed form, and AIPerf's config.yml as it stands."""

from accelmark.automl.config.aiperf import is_aiperf, read_aiperf
from accelmark.automl.config.load import Loaded, load_config, resolve_network
from accelmark.automl.config.model import (
    AddressCluster,
    AutomlConfig,
    ClusterConfig,
    DatasetConfig,
    LocalCluster,
    ScheduleConfig,
    SearchConfig,
    SshCluster,
    TrainingConfig,
    TuningConfig,
)

__all__ = [
    "AddressCluster",
    "AutomlConfig",
    "ClusterConfig",
    "DatasetConfig",
    "Loaded",
    "LocalCluster",
    "ScheduleConfig",
    "SearchConfig",
    "SshCluster",
    "TrainingConfig",
    "TuningConfig",
    "is_aiperf",
    "load_config",
    "read_aiperf",
    "resolve_network",
]
