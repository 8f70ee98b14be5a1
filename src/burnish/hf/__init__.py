"""The compatible face: ``Trainer``, ``Seq2SeqTrainer``, ``SFTTrainer`` and their arguments, with the names, defaults
and behaviour of transformers and TRL, on burnish's loop. Begin with ``trainer.py``; ``arguments`` holds the arguments,
``sft`` supervised fine-tuning.
"""
