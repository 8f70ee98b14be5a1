"""Answers for others: `burnish api`, `burnish chat`, `burnish eval`, each over the engine of ``infer``.

In:  a folder with a model, then requests, lines at a terminal, or questions of a task. Out: OpenAI's JSON and event
     streams, a conversation, a table of results.
Begin with ``api.py`` for the server: a body is read by ``requests.py``, becomes ids in ``prompts.py``, is answered in
``answering.py`` and written by ``chat_wire.py`` or ``text_wire.py``. ``terminal`` and ``evaluate`` have pages of their
own.
"""
