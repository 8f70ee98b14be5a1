"""The compatible classes: ``Trainer``, ``Seq2SeqTrainer``, ``SFTTrainer``, ``DPOTrainer`` and the other trainers of
TRL.

Names, defaults and behavior are those of transformers and TRL; the training loop is burnish's. Begin with
``trainer.py``. ``arguments`` has the arguments, ``trl`` supervised fine-tuning and preference optimization.
"""
