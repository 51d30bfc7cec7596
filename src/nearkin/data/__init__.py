"""Data: from files to batches of views."""
