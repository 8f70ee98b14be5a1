"""The compatible face: ``Trainer``, ``Seq2SeqTrainer``, ``SFTTrainer``, ``DPOTrainer`` and its kin, their arguments:
the names, defaults and behaviour of transformers and TRL, on burnish's loop. Begin with ``trainer.py``; ``arguments``
holds the arguments, ``sft`` supervised fine-tuning, ``preferences`` learning from preferences.
"""
