"""A small Llama on the bytes of Shakespeare's plays in PaddlePaddle."""

from accelmark.cases.llama_mini.arrays import Case as Case
