"""``GRPOTrainer`` and ``RLOOTrainer`` with TRL's constructors, configs, records and names in the log, over the
objective of ``rollouts/``. Begin with ``trainer.py``."""
