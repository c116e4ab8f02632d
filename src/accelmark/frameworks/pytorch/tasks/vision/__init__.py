"""Families of detection and segmentation."""
