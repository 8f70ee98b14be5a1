"""HTTP server shared by the API and the web UI.

In:  a Starlette application and its options. Out: a server that listens, drains and exits; checked requests, bodies
     with size limits, error objects, event streams, static files.
Begin with ``server.py``, then ``guards.py`` for the checks of requests.
"""
