"""DLRM-DCNv2 on a made-up click log."""
