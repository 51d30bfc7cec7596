"""Self-supervised contrastive learning of images, and discovery of the classes nobody named."""

__version__ = "0.1.0"
