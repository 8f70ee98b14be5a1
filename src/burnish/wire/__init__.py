"""Common parts of servers: guards, error objects, bodies, event streams, static files, sockets. Imports core only."""
