"""Vision models: image tensors, and image features at the positions of placeholders."""
