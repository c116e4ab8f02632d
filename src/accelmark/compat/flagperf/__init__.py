"""FlagPerf's formats: configuration files, which are not executed, and monitor logs and scripts."""
