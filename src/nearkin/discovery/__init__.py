"""Discovery of classes: how many there are, which picture belongs where, and how sure that is."""
