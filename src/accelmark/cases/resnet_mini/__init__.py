"""A small ResNet on Fashion-MNIST."""
