"""RT-DETR on COCO."""
