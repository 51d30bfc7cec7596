"""Training: the loop, its optimizer, its checkpoints and its health."""
