"""Evaluation: what an encoder knows, measured beside its floors. It never asks how the encoder was trained."""
