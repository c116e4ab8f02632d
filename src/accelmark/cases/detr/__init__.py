"""DETR on COCO."""
