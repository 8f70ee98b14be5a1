"""What a run does with images: the family of its model, and the batches of rows that hold them."""
