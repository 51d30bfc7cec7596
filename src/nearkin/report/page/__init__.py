"""Pages for people, made of plain values: no torch, no files, nothing from the network."""
