"""A hub on loopback: what `huggingface_hub` calls to make a repository, commit small files and download one."""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[dict] = field(default_factory=list)


class FakeHub(ThreadingHTTPServer):
    """Holds repositories by name, remembers every request, and misbehaves on request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.failure: tuple[int, str] | None = None
        """Answered to everything: a status, and what is said with it."""
        self.cut = 0
        """How many bytes are missing at the end of a download."""
        self.agrees_on_size = False
        """Whether a download that is cut is announced as that short."""

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._passes():
            match self._path():
                case ["api", "repos", "create"]:
                    self._create(json.loads(body))
                case ["api", "validate-yaml"]:
                    self._json({"errors": [], "warnings": []})
                case ["api", "models", owner, name, "preupload", "main"]:
                    self._preupload(f"{owner}/{name}", json.loads(body))
                case ["api", "models", owner, name, "commit", "main"]:
                    self._commit(f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])
                case ["api", "models", _, _, "preupload" | "commit", _]:
                    self._missing("RevisionNotFound")
                case _:
                    self._missing("RepoNotFound")

    def do_HEAD(self):
        self._download(with_body=False)

    def do_GET(self):
        match self._path():
            case ["api", "models", owner, name]:
                if self._passes():
                    found = self.server.repositories[f"{owner}/{name}"]
                    self._json({"id": f"{owner}/{name}", "private": found.private})
            case _:
                self._download(with_body=True)

    def _path(self):
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def _passes(self):
        self.server.requests.append((self.command, self.path, self.headers["Authorization"]))
        if self.server.failure is None:
            return True
        status, said = self.server.failure
        self._json({"error": said}, status, {"X-Error-Message": said.splitlines()[0]})
        return False

    def _create(self, asked):
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        status = 409 if name in self.server.repositories else 200
        private = asked.get("visibility") == "private"
        self.server.repositories.setdefault(name, Repository(private))
        self._json({"url": f"{self.server.address}/{name}"}, status)

    def _preupload(self, repository, asked):
        if repository not in self.server.repositories:
            return self._missing("RepoNotFound")
        files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked["files"]]
        return self._json({"files": files})

    def _commit(self, repository, lines):
        found = self.server.repositories[repository]
        found.commits.append(next(line["value"] for line in lines if line["key"] == "header"))
        for line in lines:
            if line["key"] == "file":
                found.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        address = f"{self.server.address}/{repository}/commit/{COMMIT}"
        self._json({"commitUrl": address, "commitOid": COMMIT, "success": True})

    def _download(self, with_body):
        if not self._passes():
            return
        match self._path():
            case [owner, name, "resolve", revision, file]:
                found = self.server.repositories.get(f"{owner}/{name}")
                if found is None:
                    self._missing("RepoNotFound")
                elif revision not in ("main", COMMIT):
                    self._missing("RevisionNotFound")
                elif file not in found.files:
                    self._missing("EntryNotFound")
                else:
                    self._file(found.files[file], with_body)
            case _:
                self._missing("RepoNotFound")

    def _file(self, data, with_body):
        sent = data[: len(data) - self.server.cut]
        self.send_response(200)
        self.send_header("Content-Length", str(len(sent if self.server.agrees_on_size else data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(sent)

    def _missing(self, code):
        self._json({"error": code}, 404, {"X-Error-Code": code})

    def _json(self, value, status=200, headers=None):
        data = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
