"""A small Llama on the bytes of Shakespeare's plays in TensorFlow."""

from accelmark.cases.llama_mini.arrays import Case as Case
