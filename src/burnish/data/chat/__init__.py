"""Chat templates. In: an example. Out: a row: ids, and labels for what is learned. Begin with ``choose.py`` (which
template a run has), then ``rows.py``; the named templates are data (``templates.json``, read by ``table.py``), tool
formats are in ``tools.py``, and ``truncate.py`` cuts conversations that are too long.
"""
