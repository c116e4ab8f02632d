"""Mask2Former on ADE20K."""
