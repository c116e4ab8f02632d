"""ONNX files: export, conversion to a precision, and the types that a graph computes in."""
