"""Fetch a file from a host that the operator allows.

Rejected: other schemes, hosts and ports; host names with any non-global address (private networks, this machine,
link-local addresses such as cloud metadata services, also if embedded in an IPv6 address); redirects; files that are
too large or take too long; compressed bodies, which could be small when sent and huge when decoded.

A name is resolved once, and the connection is made to the address that was checked, since a second lookup could return
another address. Proxies of the environment are not used.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from socket import create_connection, getaddrinfo
from urllib.parse import SplitResult, urlsplit

PORTS = {"http": 80, "https": 443}
_CHUNK = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class NotFetchedError(ValueError):
    """Raised if a file cannot be fetched. The message continues a sentence that begins with the name of the field."""


def fetch(url: str, hosts: Collection[str], most_bytes: int, timeout_s: float) -> bytes:
    """Return the content at a URL.

    Args:
        url: URL to fetch.
        hosts: allowed hosts in lower case, with port (``host:8080``), which may be omitted if it is that of the scheme.
        most_bytes: maximum size.
        timeout_s: maximum total time in seconds, without name resolution, which the system limits.

    Raises:
        NotFetchedError: with the reason.
    """
    found = parse_url(url, hosts)
    host, port = found.hostname or "", found.port or PORTS[found.scheme]
    address = global_address(host, port)
    until = time.monotonic() + timeout_s
    connection = _PinnedConnection(found.scheme, host, port, address, timeout_s)
    clock = threading.Timer(timeout_s, connection.abort)
    clock.start()
    try:
        target = (found.path or "/") + (f"?{found.query}" if found.query else "")
        connection.request("GET", target, headers={"Accept-Encoding": "identity", "User-Agent": "burnish"})
        return _body(connection.getresponse(), most_bytes)
    except (OSError, HTTPException, ValueError) as error:
        has_timed_out = time.monotonic() >= until
        if isinstance(error, NotFetchedError) and not has_timed_out:
            raise
        reason = f"it took more than {timeout_s:g} s" if has_timed_out else _reason(error)
        raise NotFetchedError(f"could not be fetched: {reason}.") from None
    finally:
        clock.cancel()
        connection.close()


def parse_url(url: str, hosts: Collection[str]) -> SplitResult:
    """Return the parts of a URL whose host and port are allowed. Raises NotFetchedError."""
    try:
        found = urlsplit(url)
        host, port = (found.hostname or "").lower(), found.port
    except ValueError:
        raise NotFetchedError("is not a valid URL.") from None
    if found.scheme not in PORTS or not host:
        raise NotFetchedError("is not a valid http or https URL.")
    if found.username is not None or found.password is not None:
        raise NotFetchedError("must not contain a user name or a password.")
    if any(letter <= " " or letter == "\x7f" for letter in url) or not url.isascii():
        raise NotFetchedError("contains characters that must be percent-encoded.")
    usual = PORTS[found.scheme]
    names = {f"{host}:{port or usual}", *([host] if port in (None, usual) else [])}
    if names.isdisjoint(hosts):
        raise NotFetchedError("is on a host that allow_image_urls does not list.")
    return found


def global_address(host: str, port: int) -> Address:
    """Return the first address of ``host`` if all its addresses are global. Raises NotFetchedError."""
    try:
        found = getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise NotFetchedError("has a host name that cannot be resolved.") from None
    addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in found]
    if not addresses or not all(map(is_global, addresses)):
        raise NotFetchedError("is on a host with an address that is not public.")
    return addresses[0]


def is_global(address: Address) -> bool:
    """Return whether an address, and every IPv4 address embedded in it, belongs to the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if not all(is_global(one) for one in inner if one is not None):
            return False
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast


class _PinnedConnection(HTTPConnection):
    """A connection to a checked address, with the host name used for HTTP and TLS."""

    def __init__(self, scheme: str, host: str, port: int, address: Address, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self.scheme, self.address = scheme, address
        self.connected: socket.socket | None = None  # ``sock`` is reset while the response is read
        self.is_aborted = False

    def connect(self) -> None:
        found = create_connection((str(self.address), self.port), self.timeout)
        if self.scheme == "https":
            found = ssl.create_default_context().wrap_socket(found, server_hostname=self.host)
        self.sock = self.connected = found
        if self.is_aborted:  # while there was no connection to shut down
            self.abort()

    def abort(self) -> None:
        """Abort the request from another thread."""
        self.is_aborted = True
        with suppress(OSError):
            if self.connected is not None:
                self.connected.shutdown(socket.SHUT_RDWR)


def _body(response: HTTPResponse, most_bytes: int) -> bytes:
    if 300 <= response.status < 400:
        raise NotFetchedError(f"redirects (status {response.status}), and redirects are not followed.")
    if response.status != 200:
        raise NotFetchedError(f"could not be fetched: the host returned HTTP {response.status}.")
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise NotFetchedError("could not be fetched: the host returned a compressed response.")
    found = bytearray()
    while chunk := response.read1(_CHUNK):
        found += chunk
        if len(found) > most_bytes:
            raise NotFetchedError(f"is larger than {most_bytes:,} bytes.")
    if response.length:
        raise NotFetchedError("could not be fetched: the connection ended too early.")
    return bytes(found)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "the host did not respond"
    if isinstance(error, ssl.SSLError):
        return "the TLS connection failed"
    return "the connection failed"
