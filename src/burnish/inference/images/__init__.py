"""Images in prompts: the family of the model, and the inputs of the inference engine."""
