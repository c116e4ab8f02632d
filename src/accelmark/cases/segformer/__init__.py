"""SegFormer-B0 on ADE20K."""
