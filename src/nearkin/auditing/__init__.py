"""What a split hides: leaks and their price, images of one source, bad images, wrong labels."""
