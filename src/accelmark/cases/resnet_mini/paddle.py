"""A small ResNet on Fashion-MNIST in PaddlePaddle."""

from accelmark.cases.resnet_mini.arrays import Case as Case
