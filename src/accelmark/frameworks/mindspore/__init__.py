"""MindSpore: training in compiled graphs of captured Python code."""
