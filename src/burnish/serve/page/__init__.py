"""The page, `burnish webui`: runs as their folders tell of them, and a form that starts new ones.

In:  folders of runs, whoever made them; what a visitor with the key types. Out: HTML, JSON and event streams; processes
     that train, and that outlive the page.
Begin with ``app.py`` for the routes, ``runs.py`` for what is shown, ``starting.py`` for what is started. No library of
models is loaded here: ``planner.py`` is the process that knows them.
"""
