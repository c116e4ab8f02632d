"""EfficientNet-Lite0 on ImageNet, with packaged weights."""
