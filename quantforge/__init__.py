"""QuantForge: quantize a language model, prove that it is still good, serve it fast."""

__version__ = "0.1.0"
