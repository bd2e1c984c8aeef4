"""Quantization methods, one file each; each defines ``METHOD``."""
