"""HTML pages from plain values: no torch, no run folders, nothing from the network."""
