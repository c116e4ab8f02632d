"""A small ResNet on Fashion-MNIST in JAX."""

from accelmark.cases.resnet_mini.arrays import Case as Case
