"""ResNet-50 v1.5 on ImageNet in JAX."""

from accelmark.cases.resnet50.arrays import Case as Case
