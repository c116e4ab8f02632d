"""What cases, vendors, frameworks, launchers and trainers declare in their YAML files."""
