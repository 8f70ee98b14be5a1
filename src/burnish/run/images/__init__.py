"""Images in a run: the collator of rows with images."""
