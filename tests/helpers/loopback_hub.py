"""A local hub with the parts of the Hugging Face Hub's and ModelScope's HTTP interface that their clients use.

Repositories are folders. A name beginning with ``private/`` wants the token ``sesame``; the only revisions are the ones
given.
"""

import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 40
TOKEN = "sesame"


class Hub(BaseHTTPRequestHandler):
    folders: dict[str, Path] = {}
    revisions = ("main", "v2", COMMIT)
    asked: list[str] = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def answer(self):
        parts = urlsplit(self.path)
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        self.asked.append(f"{self.command} {parts.path}")
        if words[:2] == ["api", "v1"]:
            return self.modelscope(words[3:], parse_qs(parts.query))
        if words[0] == "api":
            return self.listing("/".join(words[2:4]), words[4:])
        words = words[1:] if words[0] == "datasets" else words
        return self.resolve("/".join(words[:2]), words[3], "/".join(words[4:]))

    def refused(self, name, revision):
        """Tell whether there is no such repository for this client; the answer is sent then."""
        if name.startswith("private/") and TOKEN not in self.headers.get("Authorization", ""):
            return self.send(401, error="GatedRepo") or True
        if name not in self.folders:
            return self.send(404, error="RepoNotFound") or True
        if revision not in self.revisions:
            return self.send(404, error="RevisionNotFound") or True
        return False

    def files(self, name):
        return [path for path in sorted(self.folders[name].rglob("*")) if path.is_file()]

    def listing(self, name, rest):
        kind, revision = (*rest, "revision", "main")[:2] if len(rest) > 1 else ("revision", "main")
        if self.refused(name, revision):
            return None
        result = [
            {"type": "file", "path": str(path.relative_to(self.folders[name])), "size": path.stat().st_size,
             "oid": hashlib.sha1(path.read_bytes()).hexdigest()}
            for path in self.files(name)
        ]  # fmt: skip
        if kind == "tree":
            return self.send(200, result)
        if kind == "paths-info":
            return self.send(200, [])
        return self.send(200, {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file["path"]} for file in result],
                               "private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0,
                               "likes": 0})  # fmt: skip

    def resolve(self, name, revision, file):
        if self.refused(name, revision):
            return None
        path = self.folders[name] / file
        return self.send(200, path.read_bytes()) if path.is_file() else self.send(404, error="EntryNotFound")

    def modelscope(self, words, query):
        name, revision = "/".join(words[:2]), query.get("Revision", ["master"])[0]
        if self.refused(name, "main" if revision == "master" else revision):
            return None
        if words[2:] == ["revisions"]:
            return self.send(200, {"Code": 200, "Success": True, "Data": {"RevisionMap": {
                "Branches": [{"Revision": "master", "CreatedAt": 0}], "Tags": []}}})  # fmt: skip
        if words[2:] == ["repo"]:
            return self.resolve(name, "main", query["FilePath"][0])
        result = [
            {"Name": path.name, "Path": str(path.relative_to(self.folders[name])), "Type": "blob",
             "Size": path.stat().st_size, "Revision": COMMIT, "Sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in self.files(name)
        ]  # fmt: skip
        data = (
            {"Files": result, "TotalCount": len(result), "LatestCommitter": {}} if "repo" in words else {"Name": name}
        )
        return self.send(200, {"Code": 200, "Success": True, "Data": data})

    def send(self, status, content=b"", error=""):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub(**folders):
    """The address of a hub that holds ``org_name=folder`` as org/name, until the block ends; and what it was asked."""
    handler = type("Handler", (Hub,), {"folders": {k.replace("_", "/", 1): v for k, v in folders.items()}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
    finally:
        server.shutdown()
        server.server_close()
