"""The compatible classes: ``Trainer``, ``Seq2SeqTrainer``, ``SFTTrainer``, ``DPOTrainer`` and TRL's others.

Names, defaults and behavior are those of transformers and TRL; the loop is burnish's. Begin with ``trainer.py``;
``arguments`` holds the arguments, ``trl`` supervised fine-tuning and preference optimization.
"""
