"""ViT-L/16 on ImageNet."""
