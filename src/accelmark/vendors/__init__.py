"""One folder a vendor: ``vendor.yaml``, how its devices are read, its images, and what it changes of a case."""
