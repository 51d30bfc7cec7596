"""Measures: pure functions of tables and tensors."""
