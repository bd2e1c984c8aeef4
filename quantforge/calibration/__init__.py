"""Calibration: the text that a method sees, and the statistics taken of it."""
