"""Models that see: from pictures to tensors, and from tensors to features in the place of placeholders."""
