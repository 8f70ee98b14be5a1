"""Data pipeline: from files to micro-batches. The packages are listed in the order in which a record passes through.

reading     files -> records, each with its file and line
sets        the datasets of a run: records and their layout -> examples
chat        examples -> text segments and token labels, and truncation of rows that are too long
tokens      text -> token ids; only the chat template can write control tokens
rows        encoded rows, cached on disk
batches     rows -> the batches of an epoch: order, packing, padding-free batches, prefix sharing
images      images of records and models that take them

Begin with ``sets/sources.py`` to see where a record comes from, and with ``chat/rows.py`` to see how it becomes a row.
"""
