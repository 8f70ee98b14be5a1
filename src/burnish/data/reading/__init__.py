"""Files -> records. In: a path. Out: records, read one by one, each with the file and line that an error names.
Refused: text that is not what its name says, by line or byte. Begin with ``files.py``.
"""
