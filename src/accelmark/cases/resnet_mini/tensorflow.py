"""A small ResNet on Fashion-MNIST in TensorFlow."""

from accelmark.cases.resnet_mini.arrays import Case as Case
