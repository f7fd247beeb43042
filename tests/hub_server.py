"""A small Hugging Face Hub on 127.0.0.1 that speaks the protocol of the real client.

Read from huggingface_hub 2.4 (`hf_api.py`, `_commit_api.py`, `lfs.py`, `file_download.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import RLock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from hub_push import ROUTES, Answer, Refused, Request
from hub_state import COMMIT, Blob, FolderRepo, Hub, Repo

__all__ = ["COMMIT", "Blob", "Hub", "Repo", "serve"]


@contextmanager
def serve(folder: Path | None = None) -> Iterator[Hub]:
    """Serve until the block ends; ``folder`` is the public ``org/tiny``, beside ``org/gated``."""
    hub = Hub()
    if folder:
        hub.repos = {name: FolderRepo(name, folder) for name in ("org/tiny", "org/gated")}
        hub.repos["org/gated"].gated = True
    handler = type("Handler", (_Handler,), {"hub": hub, "lock": RLock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    lock: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self._handle(b"")

    def do_POST(self) -> None:
        self._handle(self._body())

    def do_PUT(self) -> None:
        self._handle(self._body())

    def do_DELETE(self) -> None:
        self._handle(self._body())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _handle(self, body: bytes) -> None:
        url = urlsplit(self.path)
        parts = tuple(unquote(part) for part in url.path.strip("/").split("/"))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        request = Request(self.hub, self.command, parts, url.query, token, body)
        try:
            for step, matches, act in ROUTES:
                if matches(request):
                    return self._act(step, act, request)
            return self._read(request)
        except Refused as refused:
            return self._send(refused.status, refused.headers, refused.body)

    def _act(self, step: str, act: Any, request: Request) -> None:
        self.hub.steps.append(step)
        fault = self.hub.faults.get(step) and self.hub.faults[step].pop(0)
        if callable(fault):
            fault()
        if isinstance(fault, int) and fault:
            raise Refused(fault, f"{step} is made to fail")
        if fault == "drop":
            self.close_connection = True
            return None
        with self.lock:
            answer: Answer = act(request)
        if fault == "lose":
            self.close_connection = True
            return None
        return self._send(200, answer.headers, answer.body)

    def _read(self, request: Request) -> None:
        parts = request.parts
        api = parts[:2] == ("api", "models")
        repo = request.repo("/".join(parts[2:4] if api else parts[:2]))
        rest = parts[4:] if api else parts[2:]
        revision = rest[1] if len(rest) > 1 else "main"
        oid = repo.find(revision)
        if oid is None:
            raise Refused(404, "", "RevisionNotFound")
        if api and rest[:1] == ("refs",):
            return self._json(_refs(repo))
        if api and rest[:1] == ("tree",):
            if rest[2:]:
                raise Refused(404, "", "EntryNotFound")
            return self._json([_tree_entry(*item) for item in repo.tree(oid).items()])
        if api:
            return self._json(_info(repo, oid))
        if repo.gated:
            raise Refused(403, "", "GatedRepo")
        return self._resolve(repo.tree(oid), "/".join(rest[2:]), oid)

    def _resolve(self, tree: dict[str, Blob], name: str, commit: str) -> None:
        if name not in tree:
            raise Refused(404, "", "EntryNotFound")
        data = tree[name].data
        headers = {"ETag": f'"{tree[name].etag}"', "X-Repo-Commit": commit}
        headers["Accept-Ranges"] = "bytes"
        wanted, total, status = self.headers.get("Range"), len(data), 200
        if wanted and self.hub.honours_ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1 if last else total]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{total}"
            status = 206
        return self._send(status, headers, data, name)

    def _send(self, status: int, headers: dict[str, str], data: bytes, name: str = "") -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        body = b"" if self.command == "HEAD" else data
        if body and name in self.hub.damaged_once:
            self.hub.damaged_once.remove(name)
            body = body[:-1] + bytes((body[-1] ^ 1,))
        if name in self.hub.cut_once:
            self.hub.cut_once.remove(name)
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)
        if name:
            self.hub.sent.append((self.command, name, len(body)))

    def _json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _info(repo: Repo, oid: str) -> dict[str, Any]:
    siblings: list[dict[str, Any]] = []
    for name, blob in repo.tree(oid).items():
        entry = _tree_entry(name, blob)
        siblings.append({"rfilename": name, "size": entry["size"], "blobId": entry["oid"]})
        if blob.large:
            siblings[-1]["lfs"] = {"sha256": blob.sha256, **entry["lfs"]}
    return {
        "_id": "1",
        "id": repo.repo_id,
        "sha": oid,
        "siblings": siblings,
        "private": repo.private,
        "gated": "auto" if repo.gated else False,
        "cardData": repo.card,
    }


def _tree_entry(name: str, blob: Blob) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(blob.data), "oid": blob.oid}
    if blob.large:
        size = len(blob.data)
        entry["lfs"] = {"oid": blob.sha256, "size": size, "pointerSize": len(blob.pointer)}
    return entry


def _refs(repo: Repo) -> dict[str, Any]:
    def rows(prefix: str, found: dict[str, str]) -> list[dict[str, str]]:
        return [{"name": n, "ref": prefix + n, "targetCommit": oid} for n, oid in found.items()]

    branches = {name: oid for name, oid in repo.refs.items() if not name.startswith("refs/")}
    return {
        "branches": rows("refs/heads/", branches),
        "tags": rows("refs/tags/", repo.tags),
        "converts": [],
        "pullRequests": [],
    }
