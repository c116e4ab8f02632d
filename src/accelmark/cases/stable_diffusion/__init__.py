"""Stable Diffusion 2 on captioned latents."""
