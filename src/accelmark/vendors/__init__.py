"""One folder per vendor: ``vendor.yaml``, a device reader, container images, and adaptations of cases."""
