"""TRL's trainers, based on burnish's ``Trainer``: supervised fine-tuning and preference optimization."""
