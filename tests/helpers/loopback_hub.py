"""A local server with the parts of the Hugging Face Hub's and ModelScope's HTTP interface that their clients use.

Repositories are folders. Names that begin with ``private/`` require the token ``sesame``. The revisions are fixed.
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
    revisions = ("main", "v2", "refs/pr/1", COMMIT)
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
        segments = [unquote(segment) for segment in parts.path.strip("/").split("/")]
        self.asked.append(f"{self.command} {parts.path}")
        if segments[:2] == ["api", "v1"]:
            return self.modelscope(segments[3:], parse_qs(parts.query))
        if segments[0] == "api":
            return self.listing("/".join(segments[2:4]), segments[4:])
        segments = segments[1:] if segments[0] == "datasets" else segments
        return self.resolve("/".join(segments[:2]), segments[3], "/".join(segments[4:]))

    def refused(self, name, revision):
        """Send an error if the repository or revision does not exist for this client. Returns whether it did."""
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

    def modelscope(self, segments, query):
        name, revision = "/".join(segments[:2]), query.get("Revision", ["master"])[0]
        if self.refused(name, "main" if revision == "master" else revision):
            return None
        if segments[2:] == ["revisions"]:
            return self.send(200, {"Code": 200, "Success": True, "Data": {"RevisionMap": {
                "Branches": [{"Revision": "master", "CreatedAt": 0}], "Tags": []}}})  # fmt: skip
        if segments[2:] == ["repo"]:
            return self.resolve(name, "main", query["FilePath"][0])
        result = [
            {"Name": path.name, "Path": str(path.relative_to(self.folders[name])), "Type": "blob",
             "Size": path.stat().st_size, "Revision": COMMIT, "Sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in self.files(name)
        ]  # fmt: skip
        data = (
            {"Files": result, "TotalCount": len(result), "LatestCommitter": {}}
            if "repo" in segments
            else {"Name": name}
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
    """Serve ``org_name=folder`` as org/name until the block ends. Yields the address and the list of requests."""
    handler = type("Handler", (Hub,), {"folders": {k.replace("_", "/", 1): v for k, v in folders.items()}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
    finally:
        server.shutdown()
        server.server_close()
