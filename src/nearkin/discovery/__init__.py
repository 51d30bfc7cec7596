"""Discovery of classes: how many there are, which image belongs where, and how sure that is."""
