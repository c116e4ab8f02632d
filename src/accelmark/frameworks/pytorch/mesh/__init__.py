"""Spreading a model over a mesh of ranks: its replicas, shards, split layers, stages and experts."""
