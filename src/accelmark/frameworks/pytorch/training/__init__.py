"""What a rank needs around the model: device, random seeds, clock, evaluation, checkpoints."""
