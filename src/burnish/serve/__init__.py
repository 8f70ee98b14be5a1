"""Serving: ``burnish api``, ``burnish chat``, ``burnish eval`` and the web UI, all based on ``inference``.

Begin with ``api/command.py`` for the API server: ``api/requests.py`` parses a request, ``api/prompts.py`` renders it to
token ids, ``api/completions.py`` runs it, and ``api/chat_responses.py`` or ``api/text_responses.py`` writes the
response. ``chat`` is the terminal chat, ``eval`` the evaluation, ``page`` the web UI, ``http`` their common HTTP
server.
"""
