"""Images in prompts: the family of the model, and what an engine is given of them."""
