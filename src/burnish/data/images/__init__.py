"""Images, from a record to the tokens of a row. Pixels are decoded when a batch is collated, not here."""
