"""The steps by which a client writes to a Hub; each is one function of a request."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml
from hub_state import LARGE, TIME, Blob, Hub, Repo

EXTENSIONS = (".safetensors", ".bin", ".model")


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message or code} | (
            {"X-Error-Code": code} if code else {}
        )
        self.body = json.dumps({"error": message or code}).encode()


@dataclass
class Answer:
    """A success."""

    value: Any = None

    @property
    def body(self) -> bytes:
        """The JSON text."""
        return json.dumps(self.value if self.value is not None else {}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """A part of an upload is answered with its hash."""
        etag = (
            {"ETag": self.value["etag"]}
            if isinstance(self.value, dict) and "etag" in self.value
            else {}
        )
        return {"Content-Type": "application/json"} | etag


@dataclass
class Request:
    """One call: its path in decoded parts, the query text, the token and the body."""

    hub: Hub
    method: str
    parts: tuple[str, ...]
    query: str
    token: str
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    @property
    def user(self) -> tuple[str, tuple[str, ...], str]:
        """Name, organisations and role; 401 without a good token."""
        if self.token not in self.hub.users:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.hub.users[self.token]

    def repo(self, repo_id: str) -> Repo:
        """A repository that the token may see."""
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and self.token not in self.hub.users):
            raise Refused(401 if repo is None and not self.token else 404, "", "RepoNotFound")
        return repo

    def writable(self) -> Repo:
        """The repository of ``/api/models/ORG/NAME/…``, which the token may write."""
        repo = self.repo("/".join(self.parts[2:4]))
        self.require_write(repo.repo_id.partition("/")[0])
        return repo

    def require_write(self, namespace: str) -> None:
        """403 unless the token may write there."""
        name, orgs, role = self.user
        if role != "write" or namespace not in (name, *orgs):
            raise Refused(403, f"You don't have the rights to write to {namespace}")


def _whoami(request: Request) -> Answer:
    name, orgs, role = request.user
    return Answer(
        {
            "type": "user",
            "name": name,
            "orgs": [{"name": org, "roleInOrg": role} for org in orgs],
            "auth": {"type": "access_token", "accessToken": {"displayName": "t", "role": role}},
        }
    )


def _create(request: Request) -> Answer:
    asked = request.json
    namespace = asked["organization"] or request.user[0]
    request.require_write(namespace)
    repo_id = f"{namespace}/{asked['name']}"
    if repo_id in request.hub.repos:
        refused = Refused(409, "You already created this model repo")
        refused.body = json.dumps({"url": f"{request.hub.url}/{repo_id}"}).encode()
        raise refused
    request.hub.repos[repo_id] = Repo(repo_id, private=asked.get("visibility") == "private")
    return Answer({"url": f"{request.hub.url}/{repo_id}", "name": repo_id, "id": "1"})


def _validate(request: Request) -> Answer:
    text = request.json["content"]
    try:
        data = yaml.safe_load(text.split("---\n")[1])
    except (yaml.YAMLError, IndexError) as error:
        raise Refused(400, str(error)) from error
    if not isinstance(data, dict):
        raise Refused(400, "metadata is no mapping")
    return Answer({"errors": [], "warnings": []})


def _preupload(request: Request) -> Answer:
    repo = request.writable()
    oid = repo.find(request.parts[5])
    if oid is None:
        raise Refused(404, "", "RevisionNotFound")
    tree = repo.tree(oid)
    files = []
    for file in request.json["files"]:
        large = file["size"] >= LARGE or file["path"].endswith(EXTENSIONS)
        there = tree.get(file["path"])
        files.append(
            {
                "path": file["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
                "oid": there.etag if there else None,
            }
        )
    return Answer({"files": files, "commitOid": oid})


def _batch(request: Request) -> Answer:
    request.require_write(request.parts[0])
    hub, objects = request.hub, []
    for wanted in request.json["objects"]:
        href = f"{hub.url}/lfs/{wanted['oid']}"
        upload: dict[str, Any] = {"href": href, "header": {}}
        if hub.multipart:
            count = -(-wanted["size"] // hub.multipart)
            upload["header"] = {str(n + 1): f"{href}/{n + 1}" for n in range(count)}
            upload["header"]["chunk_size"] = str(hub.multipart)
            upload["href"] = f"{href}/complete"
        actions = {"upload": upload, "verify": {"href": f"{href}/verify", "header": {}}}
        there = wanted["oid"] in hub.objects
        objects.append(wanted if there else wanted | {"actions": actions})
    return Answer({"transfer": "multipart" if hub.multipart else "basic", "objects": objects})


def _put(request: Request) -> Answer:
    oid, part = request.parts[1], request.parts[2:]
    if part:
        request.hub.parts[f"{oid}/{part[0]}"] = request.body
        return Answer({"etag": hashlib.md5(request.body).hexdigest()})
    _store(request.hub, oid, request.body)
    return Answer()


def _complete(request: Request) -> Answer:
    hub, oid = request.hub, request.parts[1]
    numbers = [part["partNumber"] for part in request.json["parts"]]
    _store(hub, oid, b"".join(hub.parts.pop(f"{oid}/{number}") for number in numbers))
    return Answer()


def _store(hub: Hub, oid: str, data: bytes) -> None:
    if hashlib.sha256(data).hexdigest() != oid:
        raise Refused(400, "the content has another SHA-256")
    hub.objects[oid] = data


def _verify(request: Request) -> Answer:
    if request.json["oid"] not in request.hub.objects:
        raise Refused(404, "no such object")
    return Answer()


def _commit(request: Request) -> Answer:
    repo, ref = request.writable(), request.parts[5]
    lines = [json.loads(line) for line in request.body.splitlines()]
    header = lines[0]["value"]
    if ref not in repo.refs:
        raise Refused(404, "", "RevisionNotFound")
    if header.get("parentCommit", repo.refs[ref]) != repo.refs[ref]:
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    tree = dict(repo.tree(repo.refs[ref]))
    for line in lines[1:]:
        value = line["value"]
        if line["key"] == "file":
            tree[value["path"]] = Blob(base64.b64decode(value["content"]))
        elif line["key"] == "lfsFile":
            if value["oid"] not in request.hub.objects:
                raise Refused(400, f"the object of {value['path']} was not uploaded")
            tree[value["path"]] = Blob(request.hub.objects[value["oid"]], large=True)
        elif line["key"] == "deletedFile":
            del tree[value["path"]]
    oid = repo.commit(ref, tree, header["summary"])
    return Answer(
        {
            "success": True,
            "commitOid": oid,
            "commitUrl": f"{request.hub.url}/{repo.repo_id}/commit/{oid}",
            "pullRequestUrl": None,
        }
    )


def _branch(request: Request) -> Answer:
    repo, name = request.writable(), request.parts[5]
    if name in repo.refs:
        raise Refused(409, "this branch exists")
    start = repo.find(request.json.get("startingPoint", "main"))
    repo.commit(name, repo.tree(str(start)), f"branch {name}")
    return Answer()


def _tag(request: Request) -> Answer:
    repo, name = request.writable(), request.json["tag"]
    if name in repo.tags:
        raise Refused(409, "this tag exists")
    repo.tags[name] = str(repo.find(request.parts[5]))
    return Answer()


def _pulls(request: Request) -> Answer:
    repo = request.writable()
    if request.method == "GET":
        return Answer({"discussions": repo.pulls, "start": 0, "count": len(repo.pulls)})
    number = len(repo.pulls) + 1
    repo.pulls.append(
        {
            "title": request.json["title"],
            "num": number,
            "author": {"name": request.user[0]},
            "createdAt": TIME,
            "status": "draft",
            "repo": {"name": repo.repo_id, "type": "model"},
            "isPullRequest": True,
            "changes": {"base": "refs/heads/main"},
            "filesWithConflicts": [],
            "events": [],
        }
    )
    repo.commit(f"refs/pr/{number}", repo.tree(repo.refs["main"]), "open")
    return Answer({"num": number})


def _pull(request: Request) -> Answer:
    return Answer(request.writable().pulls[int(request.parts[5]) - 1])


def _status(request: Request) -> Answer:
    pull = request.writable().pulls[int(request.parts[5]) - 1]
    pull["status"] = request.json["status"]
    event = {"id": "1", "type": "status-change", "createdAt": TIME}
    return Answer({"newStatus": event | {"data": {"status": pull["status"]}}})


def _merge(request: Request) -> Answer:
    repo = request.writable()
    pull = repo.pulls[int(request.parts[5]) - 1]
    if pull["status"] != "open":
        raise Refused(400, f"the pull request is {pull['status']}")
    repo.commit("main", repo.tree(repo.refs[f"refs/pr/{pull['num']}"]), pull["title"])
    pull["status"] = "merged"
    return Answer()


def _collection(request: Request) -> Answer:
    asked = request.json
    request.require_write(asked["namespace"])
    slug = f"{asked['namespace']}/{asked['title'].lower().replace(' ', '-')}-0"
    if slug in request.hub.collections:
        refused = Refused(409, "this collection exists")
        refused.body = json.dumps({"slug": slug}).encode()
        raise refused
    request.hub.collections[slug] = {
        "slug": slug,
        "title": asked["title"],
        "owner": {"name": asked["namespace"]},
        "items": [],
        "lastUpdated": TIME,
        "position": 0,
        "private": asked["private"],
        "theme": "blue",
        "upvotes": 0,
    }
    return Answer(request.hub.collections[slug])


def _items(request: Request) -> Answer:
    found = request.hub.collections["/".join(request.parts[2:4])]
    item = request.json["item"]
    if any(item["id"] == there["id"] for there in found["items"]):
        raise Refused(409, "this item is there")
    found["items"].append(item | {"_id": "1", "position": len(found["items"])})
    return Answer(found)


def _shown(request: Request) -> Answer:
    return Answer(request.hub.collections["/".join(request.parts[2:4])])


def _api(method: str, *shape: str) -> Callable[[Request], bool]:
    """Whether a request has this method and path; ``*`` stands for one part."""

    def matches(request: Request) -> bool:
        return (
            request.method in method.split()
            and len(request.parts) == len(shape)
            and all(want in ("*", part) for want, part in zip(shape, request.parts, strict=True))
        )

    return matches


_MODEL = ("api", "models", "*", "*")

ROUTES: tuple[tuple[str, Callable[[Request], bool], Callable[[Request], Answer]], ...] = (
    ("whoami", _api("GET", "api", "whoami-v2"), _whoami),
    ("create", _api("POST", "api", "repos", "create"), _create),
    ("validate", _api("POST", "api", "validate-yaml"), _validate),
    ("preupload", _api("POST", *_MODEL, "preupload", "*"), _preupload),
    ("batch", _api("POST", "*", "*", "info", "lfs", "objects", "batch"), _batch),
    ("verify", _api("POST", "lfs", "*", "verify"), _verify),
    ("complete", _api("POST", "lfs", "*", "complete"), _complete),
    ("put", _api("PUT", "lfs", "*"), _put),
    ("put", _api("PUT", "lfs", "*", "*"), _put),
    ("commit", _api("POST", *_MODEL, "commit", "*"), _commit),
    ("branch", _api("POST", *_MODEL, "branch", "*"), _branch),
    ("tag", _api("POST", *_MODEL, "tag", "*"), _tag),
    ("pulls", _api("GET POST", *_MODEL, "discussions"), _pulls),
    ("pull", _api("GET", *_MODEL, "discussions", "*"), _pull),
    ("status", _api("POST", *_MODEL, "discussions", "*", "status"), _status),
    ("merge", _api("POST", *_MODEL, "discussions", "*", "merge"), _merge),
    ("collection", _api("POST", "api", "collections"), _collection),
    ("items", _api("POST", "api", "collections", "*", "*", "items"), _items),
    ("shown", _api("GET", "api", "collections", "*", "*"), _shown),
)
