"""Object detection on canvases of Fashion-MNIST's items."""
