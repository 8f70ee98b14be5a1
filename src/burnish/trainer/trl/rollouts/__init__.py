"""``GRPOTrainer`` and ``RLOOTrainer`` with TRL's constructors, configs, records and log names, using the objective of
``rollouts/``. Begin with ``trainer.py``."""
