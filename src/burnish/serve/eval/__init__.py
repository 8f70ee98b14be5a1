"""``burnish eval``, ``burnish predict`` and ``burnish score``: benchmarks and datasets.

command.py       the command and its options
local_tasks.py   local benchmark files -> tasks of lm-evaluation-harness
harness.py       the engine as a model of lm-evaluation-harness
results.py       result files, and the comparison of several models
dataset.py       loss and responses of a dataset
score.py         scores of a reward model for any records
"""
