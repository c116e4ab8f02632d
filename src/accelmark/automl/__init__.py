"""The AutoML workload: network morphism and TPE over accelerators, scored in operations per second."""
