"""The classifier over an encoder's features, and what is known of each image by it."""
