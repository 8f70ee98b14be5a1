"""``burnish env --health``: whether a server of burnish answers on this machine, for a container to ask.

In: nothing. Out: exit status 0 where the page or the API answers ``/healthz`` on its port, 1 where neither does.
"""

from __future__ import annotations

import http.client

PORTS = (7860, 8000)
SLOWEST_S = 3.0


def health() -> int:
    """0 where a server answers."""
    return 0 if any(map(_answers, PORTS)) else 1


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SLOWEST_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
