"""What a run does with pictures: the family of its model, and the batches of rows that hold them."""
