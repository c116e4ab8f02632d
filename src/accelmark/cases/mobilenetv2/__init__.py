"""MobileNetV2 on ImageNet."""
