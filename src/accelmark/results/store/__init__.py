"""Read and write results, manifests and bundles."""
