"""A small Hugging Face Hub on 127.0.0.1: the endpoints that the real client calls, and a log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One public model, ``org/tiny``, and a gated one, ``org/gated``.

    ``sent`` logs method, file and body bytes of every answer that resolves a file.
    """

    folder: Path
    url: str = ""
    honours_ranges: bool = True
    cut_once: set[str] = field(default_factory=set)
    sent: list[tuple[str, str, int]] = field(default_factory=list)


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Serve a checkpoint folder as ``org/tiny`` until the block ends."""
    hub = Hub(folder)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo == "org/gated":
            return self._fail(403, "GatedRepo")
        if repo != "org/tiny":
            return self._fail(401, "RepoNotFound")
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self._fail(404, "RevisionNotFound")
        if api:
            return self._json(self._tree() if rest[:1] == ["tree"] else self._info())
        return self._resolve("/".join(rest[2:]))

    def _files(self) -> dict[str, bytes]:
        folder = self.hub.folder
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    def _info(self) -> dict[str, Any]:
        siblings = [{"rfilename": n, "size": len(d), "blobId": _oid(d)} for n, d in
                    self._files().items()]  # fmt: skip
        return {"_id": "1", "id": "org/tiny", "sha": COMMIT, "siblings": siblings}

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": n, "size": len(d), "oid": _oid(d)}
            for n, d in self._files().items()
        ]

    def _resolve(self, name: str) -> None:
        data = self._files().get(name)
        if data is None:
            return self._fail(404, "EntryNotFound")
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
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
        if name in self.hub.cut_once:
            self.hub.cut_once.remove(name)
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)
        if name:
            self.hub.sent.append((self.command, name, len(body)))

    def _json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _fail(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"")


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
