"""Checks that all servers share: bind address, Host, Origin, key, limits, sockets."""

from __future__ import annotations

import ast
import http.client
import json
import os
import socket
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import burnish
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.serve.api.options import ApiOptions, check_api, from_environment, needs_key, problems_of_key
from burnish.serve.http.connections import PIECE_BYTES, LimitedProtocol
from burnish.serve.http.guards import new_key, path_prefix, same_key
from burnish.serve.http.hosts import host_name, is_loopback
from burnish.serve.http.sockets import file_identity, listen, listen_unix, remove_own_socket, shown_address
from serve.client import CHAT, post, send

KEY = "canary-key-0123456789"


def test_key_is_required_on_every_route_but_health(serve) -> None:
    running = serve(key=KEY)
    status, headers, text = send(running, "POST", "/v1/chat/completions", CHAT)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert json.loads(text)["error"]["code"] == "missing_api_key"
    assert post(running, "/v1/chat/completions", CHAT, Authorization="Bearer wrong")[1]["error"]["code"] == (
        "invalid_api_key"
    )
    for scheme in (KEY, f"Basic {KEY}", f"Bearer  x{KEY}"):
        assert post(running, "/v1/chat/completions", CHAT, Authorization=scheme)[0] == 401
    for path in ("/v1/models", "/version", "/metrics", "/v1/embeddings", "/", "/docs"):
        assert send(running, "GET", path)[0] == 401, path
    for path in ("/healthz", "/readyz", "/health"):
        assert send(running, "GET", path)[0] == 200, path
    assert post(running, "/v1/chat/completions", CHAT, Authorization=f"Bearer {KEY}")[0] == 200


def test_key_in_the_url_is_not_accepted(serve) -> None:
    running = serve(key=KEY)
    assert send(running, "GET", f"/v1/models?api_key={KEY}&key={KEY}")[0] == 401


def test_keys_are_long_random_and_compared_in_full() -> None:
    assert len(new_key()) >= 43
    assert new_key() != new_key()
    assert same_key("a", "a")
    assert not same_key("a", "ab")
    assert not same_key("é\udcff", "a")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]", "10.0.0.1"])
def test_foreign_host_is_421(serve, host) -> None:
    running = serve()
    status, _, text = send(running, "GET", "/healthz", headers={"Host": host})
    assert (status, json.loads(text)["error"]["code"]) == (421, "wrong_host")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "model.lan", "other.lan", "other.lan:80"]
)
def test_known_host_is_accepted(serve, host) -> None:
    assert send(serve(api_hosts=["Model.lan", "other.lan:8000"]), "GET", "/healthz", headers={"Host": host})[0] == 200


def test_host_names_are_compared_without_port() -> None:
    assert [host_name(h) for h in ("a:1", "[::1]:80", "::1", "A.b", "[::1")] == ["a", "::1", "::1", "a.b", "::1"]
    assert is_loopback("127.9.9.9")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("my-name")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1234", "file://"])
def test_foreign_origin_is_403_on_every_route_before_reading_the_body(serve, origin) -> None:
    running = serve()
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/healthz"),
        ("OPTIONS", "/"),
    ):
        status, headers, text = send(running, method, path, headers={"Origin": origin})
        assert (status, json.loads(text)["error"]["code"]) == (403, "origin_not_allowed")
        assert not [name for name in headers if name.startswith("access-control")]
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=5)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Origin", origin)
    connection.putheader("Content-Length", "100000")
    connection.endheaders()
    assert connection.getresponse().status == 403  # before any byte of the body was sent


def test_origin_allowed_by_the_operator_is_accepted(serve) -> None:
    running = serve(api_origins=["https://chat.example.org"], key=KEY)
    overrides = {"Origin": "https://chat.example.org"}
    options = {**overrides, "Access-Control-Request-Method": "POST"}
    status, headers, _ = send(running, "OPTIONS", "/v1/chat/completions", headers=options)
    assert (status, headers["access-control-allow-origin"]) == (204, "https://chat.example.org")
    assert "authorization" in headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in headers
    status, headers, _ = send(running, "GET", "/v1/models", headers=overrides)
    assert (status, headers["access-control-allow-origin"]) == (401, "https://chat.example.org")


@pytest.mark.parametrize(
    ("requested", "allowed"),
    [
        ("authorization,content-type,x-stainless-lang", "authorization,content-type,x-stainless-lang"),
        ("x-a, x-b", "x-a, x-b"),
        ("", "authorization, content-type"),
        ("x-a\u00e9, (b)", "authorization, content-type"),
    ],
)
def test_preflight_allows_the_headers_of_openai_javascript_client(serve, requested: str, allowed: str) -> None:
    options = {
        "Origin": "https://chat.example.org", "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": requested,
    }  # fmt: skip
    running = serve(api_origins=["https://chat.example.org"])
    _, headers, _ = send(running, "OPTIONS", "/v1/chat/completions", headers=options)
    assert headers["access-control-allow-headers"] == allowed


@pytest.mark.parametrize("spelling", ["https://chat.example.org/", "https://Chat.Example.org"])
def test_allowed_origin_may_be_written_as_a_url(serve, spelling) -> None:
    assert not check_api(ApiOptions(api_origins=[spelling]))
    running = serve(api_origins=[spelling])
    assert send(running, "GET", "/v1/models", headers={"Origin": "https://chat.example.org"})[0] == 200


def test_oversized_body_is_413_by_length_and_by_counting(serve) -> None:
    running = serve(api_max_body=2000)
    began = time.monotonic()
    status, _, text = send(running, "POST", "/v1/chat/completions", b'{"a": "' + b"x" * 10_000_000 + b'"}')
    assert (status, json.loads(text)["error"]["code"]) == (413, "body_too_large")
    assert time.monotonic() - began < 2
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=5)
    pieces = iter([b'{"a": "', *[b"x" * 1000] * 3, b'"}'])
    connection.request(
        "POST", "/v1/chat/completions", pieces, {"Content-Type": "application/json"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413


def test_body_without_json_content_type_is_415(serve) -> None:
    running = serve()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        status, _, text = send(running, "POST", "/v1/chat/completions", b"{}", {"Content-Type": kind})
        assert (status, json.loads(text)["error"]["code"]) == (415, "not_json")


def test_too_many_headers_are_rejected(serve) -> None:
    running = serve()
    many = {f"x-{number}": "1" for number in range(80)}
    assert send(running, "GET", "/healthz", headers=many)[0] == 431
    assert send(running, "GET", "/healthz", headers={"x-long": "a" * 17_000})[0] in {400, 431}


@pytest.mark.parametrize(
    ("options", "is_kept"), [("abc-1.2_3", True), ("a b", False), ("x" * 65, False), ("é", False), ("a;b", False)]
)
def test_harmless_client_request_id_is_kept(serve, options, is_kept) -> None:
    _, headers, _ = send(serve(), "GET", "/healthz", headers={"X-Request-Id": options.encode("latin-1")})
    assert (headers["x-request-id"] == options) == is_kept
    assert is_kept or headers["x-request-id"].startswith("req-")


def test_ambiguous_request_head_is_rejected(serve) -> None:
    running = serve(key=KEY)
    head = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nAuthorization: Bearer x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=5) as raw:
        raw.sendall(head.format(KEY).encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 400")


# --- options of the bind ----------------------------------------------------------------------------------------------


def test_loopback_is_the_default_and_other_binds_require_a_key() -> None:
    assert ApiOptions().api_host == "127.0.0.1"
    assert not needs_key(ApiOptions())
    for host in ("0.0.0.0", "::", "192.168.1.5", "my-machine"):
        assert needs_key(ApiOptions(api_host=host))
    assert not needs_key(ApiOptions(api_host="0.0.0.0", api_socket="/tmp/x"))


def test_llamafactory_variables_are_read_without_an_option() -> None:
    environment = {
        "API_PORT": "9000",
        "API_KEY": "k" * 9,
        "FASTAPI_ROOT_PATH": "/x",
        "API_VERBOSE": "1",
        "API_HOST": "",
    }
    result = from_environment({"api_port": RawValue("1")}, environment)
    assert {name: options.value for name, options in result.items()} == {
        "api_key": "k" * 9, "api_root_path": "/x", "api_log": "content",
    }  # fmt: skip
    assert result["api_key"].where == "environment variable API_KEY"


def test_key_on_the_command_line_is_rejected() -> None:
    assert "process list" in str(problems_of_key({"api_key": RawValue("x", "the command line")}, "the command line")[0])
    assert not problems_of_key({"api_key": RawValue("x", "run.yaml, line 3")}, "the command line")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"api_key": "short"}, "at least 8"), ({"api_key": "ключ-ключ"}, "printable"),
        ({"api_origins": ["*"]}, "every website"),
        ({"api_origins": ["chat.example.org"]}, "https://"),
    ],
)  # fmt: skip
def test_insecure_option_combinations_are_problems(changes, word) -> None:
    problems = check_api(ApiOptions(**changes))
    assert any(word in str(problem) for problem in problems)


def test_port_in_use_is_an_error_without_fallback() -> None:
    taken = listen("127.0.0.1", 0, "api_port")
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"Port {port} of 127.0.0.1 is in use"):
        listen("127.0.0.1", port, "api_port")
    assert shown_address(taken) == f"http://127.0.0.1:{port}"
    taken.close()


def test_unavailable_address_is_an_error() -> None:
    with pytest.raises(UserError, match="not an address of this machine"):
        listen("no such name.invalid", 0, "api_port")
    with pytest.raises(UserError, match="Cannot listen on"):
        listen("192.0.2.1", 0, "api_port")


def test_unix_socket_is_accessible_only_to_its_owner(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    result = listen_unix(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(UserError, match="Another process is listening"):
        listen_unix(path)
    result.close()
    listen_unix(path).close()  # the socket file of a killed process is removed
    os.unlink(path)
    Path(path).write_text("not a socket")
    with pytest.raises(UserError, match="not a socket"):
        listen_unix(path)
    assert Path(path).read_text() == "not a socket"
    for impossible in (f"{path}/inner.sock", f"{tmp_path}/{'a' * 300}"):
        with pytest.raises(UserError, match="Cannot create the socket"):
            listen_unix(impossible)


def test_socket_of_a_later_server_is_not_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    first = listen_unix(path)
    identity = file_identity(path)
    first.close()
    second = listen_unix(path)
    remove_own_socket(path, identity)
    assert Path(path).is_socket()
    remove_own_socket(path, file_identity(path))
    assert not Path(path).exists()
    remove_own_socket(path, identity)
    second.close()


def test_servers_avoid_vulnerable_starlette_apis() -> None:
    source = Path(burnish.__file__).parent
    files = list(source.glob("serve/**/*.py"))
    assert files
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.Attribute) and node.attr in {"base_url", "url_for"}), file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "form":
                assert ast.unparse(node.func.value) != "request", f"{file} reads a form"
            if isinstance(node, ast.Attribute) and node.attr == "url":
                assert ast.unparse(node.value) != "request", file
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("starlette"):
                names = {alias.name for alias in node.names}
                assert not names & {"FileResponse", "StaticFiles", "HTTPEndpoint", "FormData", "TestClient"}, file


def test_server_behind_proxy_path_responds_with_and_without_it(serve) -> None:
    running = serve(api_root_path="/llm/", key=KEY)
    assert send(running, "GET", "/llm/healthz")[0] == 200
    assert send(running, "GET", "/llm/v1/models")[0] == 401
    running = serve(api_root_path="llm")
    assert send(running, "GET", "/llm/v1/models")[0] == 200
    assert send(running, "GET", "/v1/models")[0] == 200
    assert send(running, "GET", "/other/v1/models")[0] == 404


@pytest.mark.parametrize(
    ("root_path", "prefix"), [("", ""), ("/", ""), ("llm", "/llm"), ("/llm/", "/llm"), ("/proxy/7860", "/proxy/7860")]
)
def test_root_path_is_used_with_single_slashes(root_path: str, prefix: str) -> None:
    assert path_prefix(root_path) == prefix


@pytest.mark.parametrize(("chunk", "is_refused"), [(b"1\r\na\r\n", True), (b"40\r\n" + b"a" * 64 + b"\r\n", False)])
def test_beginning_of_a_request_in_tiny_chunks_is_refused(chunk: bytes, is_refused: bool) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = (head + chunk * PIECE_BYTES)[:PIECE_BYTES]
    connection = SimpleNamespace(cycle=None, headers=[])
    assert LimitedProtocol._is_of_tiny_chunks(connection, piece) is is_refused  # type: ignore[arg-type]
    plain = piece.replace(b"chunked", b"gzip")
    assert not LimitedProtocol._is_of_tiny_chunks(connection, plain)  # type: ignore[arg-type]
