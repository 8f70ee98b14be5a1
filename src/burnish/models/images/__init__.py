"""Models that see: from images to tensors, and from tensors to features in the place of placeholders."""
