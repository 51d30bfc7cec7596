"""Classes from labels of some images or of all, on top of any encoder."""
