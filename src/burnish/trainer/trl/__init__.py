"""TRL's trainers on burnish's ``Trainer``: supervised fine-tuning and preference optimization."""
