"""What other programs take: weights and graphs, read back and compared, and the model card."""
