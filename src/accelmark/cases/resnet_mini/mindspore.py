"""A small ResNet on Fashion-MNIST in MindSpore."""

from accelmark.cases.resnet_mini.arrays import Case as Case
