"""Images that a request names by URL or path: which are read, and attacks that must fail."""

from __future__ import annotations

import http.server
import ipaddress
import os
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from burnish.config.errors import UserError
from burnish.serve.api.body import read
from burnish.serve.api.image_access import ImageAccess
from burnish.serve.api.options import ApiOptions, check_api
from burnish.serve.api.requests import ChatRequest
from burnish.serve.http import fetching
from burnish.serve.http.errors import APIError
from burnish.serve.http.fetching import NotFetchedError, fetch, is_global
from serve.client import post

CONTENT = b"not a real image, and nobody asks here"
HOST = "images.test"


def request_of(url):
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
    return read(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": parts}]})


def access_error(access, url):
    with pytest.raises(APIError) as result:
        access.load_images(request_of(url))
    assert result.value.status == 400
    assert result.value.param == "messages[0].content[1].image_url.url"
    return result.value.message


# --- addresses --------------------------------------------------------------------------------------------------------


@contextmanager
def web(answer):
    """Run a local server. Args: answer: writes the response with the handler."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers["Host"]))
            answer(self)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield SimpleNamespace(
            port=server.server_port, asked=requests, url=f"http://{HOST}:{server.server_port}/a.png?b=1"
        )
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def as_public(monkeypatch):
    """Let names resolve to this machine, and let its address count as public."""
    looked_up = []

    def lookup(host, port, **_):
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(fetching, "getaddrinfo", lookup)
    monkeypatch.setattr(fetching, "is_global", lambda address: True)
    return looked_up


def respond_with_image(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(CONTENT)))
    handler.end_headers()
    handler.wfile.write(CONTENT)


def test_image_of_an_allowed_host_is_included(as_public):
    with web(respond_with_image) as server:
        access = ImageAccess([f"{HOST.upper()}:{server.port}"])
        assert access.needs(request_of(server.url))
        opened = access.load_images(request_of(server.url))
    url = opened.messages[0].parts[1].image_url.url
    assert url.startswith("data:image/any;base64,")
    assert not access.needs(opened)
    assert server.asked == [("/a.png?b=1", f"{HOST}:{server.port}")]
    assert as_public == [HOST]  # resolved once; the connection goes to the checked address


@pytest.mark.parametrize(
    ("path", "target"),
    [("", "/"), ("?b=1", "/?b=1"), ("/a;c.png?b=1#d", "/a;c.png?b=1"), ("/?", "/")],
)
def test_request_names_the_path_of_the_url(as_public, path, target):
    with web(respond_with_image) as server:
        url = f"http://{HOST}:{server.port}{path}"
        assert fetch(url, {f"{HOST}:{server.port}"}, 10_000, 5.0) == CONTENT
    assert server.asked[0][0] == target


def test_image_urls_are_rejected_unless_a_host_is_allowed():
    message = access_error(ImageAccess(), "https://example.com/a.png")
    assert "this server does not fetch URLs" in message
    assert "allow_image_urls" in message


@pytest.mark.parametrize(
    "url",
    ["https://other.test/a.png", "https://images.test.evil.test/a.png", "https://evil.test/images.test",
     "https://evil.test#images.test", "https://evil.test?images.test", "https://images.test:8080/a.png",
     "https://images.test@evil.test/a.png", "https://user:word@images.test/a.png", "https://images.test\\@evil.test/",
     "https://images.test\t.evil.test/", "https://images.test:99999/a", "https://[::1/a", "https:///a.png",
     "http://images.test/a b.png", "http://images.test/a\r\nHost: evil", "http://ımages.test/a.png",
     "HTTP://evil.test/a.png"],
)  # fmt: skip
def test_other_hosts_and_misleading_urls_are_rejected(monkeypatch, url):
    monkeypatch.setattr(fetching, "getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))
    with pytest.raises(NotFetchedError):
        fetch(url, {HOST}, 100, 1.0)
    access_error(ImageAccess([HOST]), url)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1",
     "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1",
     "2001:0:7f00:1::", "2001:db8::1"],
)  # fmt: skip
def test_private_addresses_are_never_connected_to(monkeypatch, address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    result = [(family, socket.SOCK_STREAM, 6, "", (address, 80))]
    public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", 80))
    monkeypatch.setattr(fetching, "create_connection", lambda *_: pytest.fail("a connection was made"))
    assert not is_global(ipaddress.ip_address(address))
    for addresses in (result, [public, *result]):  # also if a public address comes first
        monkeypatch.setattr(fetching, "getaddrinfo", lambda *_, given=addresses, **__: given)
        with pytest.raises(NotFetchedError, match="not public"):
            fetch(f"http://{HOST}/a.png", {HOST}, 100, 1.0)


@pytest.mark.parametrize(
    ("url", "host", "is_allowed"),
    [
        ("https://images.test/a", "images.test:443", True), ("https://images.test:443/a", "images.test", True),
        ("http://images.test/a", "images.test:80", True), ("http://images.test/a", "images.test:443", False),
        ("https://images.test:80/a", "images.test", False), ("https://images.test:8443/a", "images.test:8443", True),
    ],
)  # fmt: skip
def test_port_of_the_scheme_may_be_listed(url, host, is_allowed):
    if is_allowed:
        assert fetching.parse_url(url, {host}).hostname == "images.test"
    else:
        with pytest.raises(NotFetchedError, match="does not list"):
            fetching.parse_url(url, {host})


def test_allowed_numeric_address_is_checked():
    for host in ("127.0.0.1", "0x7f000001", "2130706433", "127.1", "localhost"):
        with pytest.raises(NotFetchedError, match=r"not public|cannot be resolved"):
            fetch(f"http://{host}/a.png", {host}, 100, 1.0)


def test_public_addresses_are_global():
    assert all(is_global(ipaddress.ip_address(one)) for one in ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:1"))


def test_dns_rebinding_is_prevented(monkeypatch):
    answers = iter(["93.184.215.14", "127.0.0.1"])
    connected = []

    def connect(where, timeout):
        connected.append(where)
        raise ConnectionRefusedError

    monkeypatch.setattr(fetching, "getaddrinfo", lambda h, p, **_: [(socket.AF_INET, 1, 6, "", (next(answers), p))])
    monkeypatch.setattr(fetching, "create_connection", connect)
    with pytest.raises(NotFetchedError, match="could not be fetched"):
        fetch(f"http://{HOST}/a.png", {HOST}, 100, 1.0)
    assert connected == [("93.184.215.14", 80)]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(as_public, status):
    def elsewhere(handler):
        handler.send_response(status)
        handler.send_header("Location", "http://169.254.169.254/latest/meta-data/")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with web(elsewhere) as server:
        assert "redirects are not followed" in access_error(ImageAccess([f"{HOST}:{server.port}"]), server.url)
        assert len(server.asked) == 1


@pytest.mark.parametrize("says_length", [True, False])
def test_oversized_file_is_not_downloaded_completely(as_public, says_length):
    sent = []

    def endless(handler):
        handler.send_response(200)
        if says_length:
            handler.send_header("Content-Length", str(10**9))
        handler.end_headers()
        try:
            for _ in range(10_000):
                handler.wfile.write(b"x" * 100_000)
                sent.append(100_000)
        except OSError:
            pass

    with web(endless) as server:
        access = ImageAccess([f"{HOST}:{server.port}"], most_bytes=300_000)
        assert "larger than 300,000 bytes" in access_error(access, server.url)
    assert sum(sent) < 10**8


def test_compressed_body_is_rejected(as_public):
    def compressed(handler):
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", "1")
        handler.end_headers()
        handler.wfile.write(b"x")

    with web(compressed) as server:
        assert "compressed" in access_error(ImageAccess([f"{HOST}:{server.port}"]), server.url)


@pytest.mark.parametrize("what", ["head", "body"])
def test_slow_host_times_out(as_public, what):
    def drip(handler):
        try:
            if what == "body":
                handler.send_response(200)
                handler.send_header("Content-Length", "1000")
                handler.end_headers()
            for _ in range(200):
                handler.wfile.write(b"x")
                handler.wfile.flush()
                time.sleep(0.02)
        except OSError:
            pass

    with web(drip) as server:
        begin = time.monotonic()
        with pytest.raises(NotFetchedError, match=r"took more than 0\.3 s"):
            fetch(server.url, {f"{HOST}:{server.port}"}, 10_000, 0.3)
        assert time.monotonic() - begin < 2.0


def test_time_that_passes_while_connecting_counts(as_public, monkeypatch):
    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"x")
            time.sleep(0.02)

    def connect_slowly(address, timeout):  # as a TLS handshake may be
        time.sleep(0.4)
        return connect(address, timeout)

    connect = fetching.create_connection
    monkeypatch.setattr(fetching, "create_connection", connect_slowly)
    with web(drip) as server, pytest.raises(NotFetchedError, match=r"took more than 0\.3 s"):
        fetch(server.url, {f"{HOST}:{server.port}"}, 10_000, 0.3)


def test_truncated_body_is_not_an_image(as_public):
    def short(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x")

    with web(short) as server:
        assert "could not be fetched" in access_error(ImageAccess([f"{HOST}:{server.port}"]), server.url)


def test_http_error_status_is_reported(as_public):
    with web(lambda handler: handler.send_error(404)) as server:
        assert "HTTP 404" in access_error(ImageAccess([f"{HOST}:{server.port}"]), server.url)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def media(tmp_path):
    root = tmp_path / "media"
    (root / "inner").mkdir(parents=True)
    (root / "a.png").write_bytes(CONTENT)
    (root / "inner" / "b c.png").write_bytes(CONTENT)
    (tmp_path / "media-old").mkdir()
    (tmp_path / "media-old" / "a.png").write_bytes(b"secret")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return root


def test_image_files_are_rejected_unless_a_folder_is_allowed(media):
    for url in ("a.png", str(media / "a.png"), f"file://{media}/a.png"):
        message = access_error(ImageAccess(), url)
        assert "files are not opened" in message
        assert "media_root" in message


def test_files_below_media_root_are_opened(media):
    access = ImageAccess(root=str(media))
    (media / "link.png").symlink_to(media / "a.png")
    urls = ["a.png", "inner/b c.png", "inner/../a.png", str(media / "a.png"), f"file://{media}/inner/b%20c.png",
            f"file://localhost{media}/a.png", "link.png"]  # fmt: skip
    for url in urls:
        assert access.content(url, "p") == CONTENT


def test_outside_and_missing_files_are_rejected_with_the_same_message(media, tmp_path):
    (media / "out.png").symlink_to(tmp_path / "secret.png")
    (media / "folder").symlink_to(tmp_path)
    urls = ["../secret.png", "inner/../../secret.png", str(tmp_path / "secret.png"), f"file://{tmp_path}/secret.png",
            f"file://{media}/../secret.png", f"file://{media}/%2e%2e/secret.png", f"{media}-old/a.png", "out.png",
            "folder/secret.png", "nothing.png", "/etc/passwd", "", ".", "inner", "a\0.png",
            "~/a.png", "/proc/self/environ", "x" * 5000]  # fmt: skip
    message = {access_error(ImageAccess(root=str(media)), url) for url in urls}
    assert message == {'"messages[0].content[1].image_url.url" is not a file inside media_root.'}


def test_pipes_and_devices_are_not_read(media):
    os.mkfifo(media / "pipe.png")
    assert "is not a file inside" in access_error(ImageAccess(root=str(media)), "pipe.png")


def test_link_created_after_the_check_is_not_followed(media, tmp_path, monkeypatch):
    access, real = ImageAccess(root=str(media)), os.path.realpath

    def swapped(path, **strict):
        result = real(path, **strict)
        (media / "a.png").unlink()
        (media / "a.png").symlink_to(tmp_path / "secret.png")
        return result

    monkeypatch.setattr("burnish.serve.api.image_access.os.path.realpath", swapped)
    assert "is not a file inside" in access_error(access, "a.png")


def test_large_file_is_rejected_before_reading(media):
    with open(media / "large.png", "wb") as file:
        file.truncate(10**12)
    assert "larger than 1,000 bytes" in access_error(ImageAccess(root=str(media), most_bytes=1000), "large.png")


def test_too_many_images_are_rejected_before_a_file_is_opened(media, serve, monkeypatch):
    opened = []
    monkeypatch.setattr(ImageAccess, "content", lambda self, url, param: opened.append(url) or CONTENT)
    running = serve(media_root=str(media))
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    message = {"role": "user", "content": [image] * 65}
    status, body = post(running, "/v1/chat/completions", {"model": "first", "messages": [message]})
    assert (status, body["error"]["param"]) == (400, "messages")
    assert "at most 64 images. Received: 65" in body["error"]["message"]
    assert not opened


@pytest.mark.parametrize(
    "url", ["ftp://images.test/a.png", "file://evil.test/a.png", "javascript://a", "gopher://x/", "jar:file://x"]
)
def test_other_url_schemes_are_rejected(media, url):
    access_error(ImageAccess([HOST], root=str(media)), url)


def test_data_uri_is_limited_in_bytes():
    access = ImageAccess(most_bytes=30)
    assert not access.needs(request_of("data:image/png;base64,AAAA"))
    assert "the maximum size of an image is 30 bytes" in access_error(access, "data:image/png;base64," + "A" * 400)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["https://images.test", "images.test/a", "*", "*.test", "", "a b"])
def test_invalid_hosts_are_rejected_before_server_start(host):
    problems = check_api(ApiOptions(allow_image_urls=[host]))
    assert any("allow_image_urls" in str(problem) for problem in problems)


def test_media_root_must_exist(tmp_path):
    assert any("media_root" in str(UserError(one)) for one in check_api(ApiOptions(media_root=str(tmp_path / "no"))))
    assert not check_api(ApiOptions(media_root=str(tmp_path), allow_image_urls=["images.test", "images.test:8080"]))
