"""Images with boxes and with segments, their augmentation, and the scores of detection and segmentation."""
