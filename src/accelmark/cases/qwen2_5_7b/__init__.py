"""The case qwen2_5_7b."""
