"""Runs: the composition root, one function per verb of the command line."""
