"""From files to micro-batches, a room per noun, in the order in which a record passes through them.

reading     files -> records, each with its file and line
sets        the data sets of a run: records and their layout -> examples
templates   examples -> pieces of text, the labels of their tokens, and truncation of rows that are too long
tokens      text -> ids, in which only the template can write control tokens
rows        encoded rows, made once and cached on disk
batches     rows -> the groups of an epoch: order, packing, padding-free batches, prefix sharing

Begin with ``sets/sources.py`` to see where a record comes from, and with ``templates/rows.py`` to see how it becomes a
row.
"""
