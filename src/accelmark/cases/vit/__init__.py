"""ViT-B/16 on ImageNet."""
