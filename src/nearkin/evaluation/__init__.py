"""Evaluation: what an encoder knows, beside its baselines. It never asks how it was trained."""
