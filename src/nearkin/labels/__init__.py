"""Which of the images have a label: by their names, by tables and folders, as exact copies."""
