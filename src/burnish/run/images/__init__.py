"""Images in a run: the family of its model and the collator of rows with images."""
