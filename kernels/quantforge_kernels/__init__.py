"""Ops of QuantForge: each with a plain-torch reference and the kernels that may replace it."""
