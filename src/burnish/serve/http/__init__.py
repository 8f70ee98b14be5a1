"""Common parts of the API's and the page's server.

In:  an application of Starlette's, its options. Out: a server that listens, drains and ends; requests that were let
     through, bodies read within bounds, error objects, event streams, static files.
Begin with ``serving.py``, then ``guards.py``: who may ask. Imports core only.
"""
