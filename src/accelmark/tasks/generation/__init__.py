"""Generation of images from captions."""
