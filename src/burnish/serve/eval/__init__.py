"""``burnish eval``: multiple-choice tasks from local files, other tasks through lm-evaluation-harness, a data set.

command.py       from the first word to the exit status, and the options
questions.py     files of a task -> questions
choices.py       questions -> which choice the model finds likeliest
results.py       what is written, and the table of several models
harness.py       lm-evaluation-harness over the engine
dataset.py       loss and answers of a data set
"""
