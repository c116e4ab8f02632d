"""AMD Instinct GPUs."""
