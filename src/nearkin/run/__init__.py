"""The run folder, its settings, and its log."""
