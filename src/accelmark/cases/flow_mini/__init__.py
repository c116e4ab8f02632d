"""Flow matching on Fashion-MNIST."""
