"""The parts of a rank around the model: device, random seeds, clock, evaluation, checkpoints."""
