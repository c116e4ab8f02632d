"""Descriptions of external trainers, one YAML file each."""
