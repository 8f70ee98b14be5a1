"""A run of the command line: options -> plan -> rows -> run -> model, and its messages.

In: the arguments of a command and its YAML file. Out: a trained model in ``output_dir``, an explanation, an export; or
sentences on what is wrong, before anything is written. Begin with ``plan.py``, then ``prepare.py``, then ``build.py``.
"""
