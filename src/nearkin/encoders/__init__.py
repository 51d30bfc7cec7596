"""Encoders: what one is, its file, and where others come from."""
