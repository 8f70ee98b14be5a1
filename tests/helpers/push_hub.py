"""A server with the part of the Hub's protocol that huggingface_hub uses to upload folders."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest


class Hub(ThreadingHTTPServer):
    """Keeps repositories and commits in memory.

    ``made`` contains the visibility of each repository, ``commits`` the message and files of each commit.
    ``before_upload`` is called before the files of a folder are read.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), RequestHandler)
        self.made, self.commits, self.tokens, self.branches = {}, [], set(), []
        self.before_upload = lambda: None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def files(self):
        return {name: content for _, files in self.commits for name, content in files.items()}


class RequestHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        hub, path = self.server, self.path.split("?")[0].removeprefix("/api/")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub.tokens.add(self.headers.get("Authorization"))
        if path == "repos/create":
            request = json.loads(body)
            name = f"{request['organization'] or 'me'}/{request['name']}"
            hub.made[name] = request.get("visibility")
            self.answer({"url": f"{hub.url}/{name}", "name": name})
        elif path == "validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            hub.before_upload()
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            hub.commits.append((lines[0]["value"]["summary"], files))
            repository, branch = path.removeprefix("models/").split("/commit/")
            hub.branches.append(branch)
            self.answer({"commitUrl": f"{hub.url}/{repository}/commit/1", "commitOid": "1", "success": True})

    def answer(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def wait_until(condition, timeout_s=60.0):
    """Wait until a condition is true, and return whether it became true."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
