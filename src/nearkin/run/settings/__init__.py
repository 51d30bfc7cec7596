"""From what was asked for to what will be trained."""
