"""A run of the command line: options -> plan -> rows -> loop -> model.

In: the arguments of a command and its YAML file. Out: a trained model in ``output_dir``; or messages about what is
wrong, before anything is written. Begin with ``plan/plan.py``, then ``prepare.py``, then ``build.py``.
"""
