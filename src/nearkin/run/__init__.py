"""What a run leaves behind, and whom it tells."""
