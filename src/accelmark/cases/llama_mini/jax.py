"""A small Llama on the bytes of Shakespeare's plays in JAX."""

from accelmark.cases.llama_mini.arrays import Case as Case
