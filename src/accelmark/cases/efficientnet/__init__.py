"""EfficientNet-B0 on ImageNet."""
