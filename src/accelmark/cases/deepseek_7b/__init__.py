"""The case deepseek_7b."""
