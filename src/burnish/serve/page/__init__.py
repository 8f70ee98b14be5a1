"""The web UI, `burnish webui`: shows the runs found in folders and starts new ones from a form.

In:  run folders of any tool; input of a user with the key. Out: HTML, JSON and event streams; training processes that
     outlive the server.
Begin with ``app.py`` for the routes, ``runs/runs.py`` for the runs, ``jobs/starting.py`` for starting them. Model
libraries are not imported here; ``jobs/planner.py`` runs them in a separate process.
"""
