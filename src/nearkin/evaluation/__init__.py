"""Evaluation: what an encoder knows, beside its floors. It never asks how it was trained."""
