"""Chat templates: from an example to a row of token ids and labels.

Begin with ``choose.py`` (the template of a run), then ``rows.py``. The named templates are data (``templates.json``,
read by ``table.py``). Tool formats are in ``tools/tool_formats.py``. ``truncate.py`` shortens long conversations.
"""
