"""Metrics: pure functions of tables and tensors."""
