"""The few routes of a Hugging Face hub that downloading a model takes, on loopback."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "abcd"
WEIGHTS = bytes(range(256)) * 4096 * 12  # 12 MiB
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
LFS_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt")


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class FakeHub:
    """repos: {"org/name": {file: bytes}}. served: {file: bytes sent}. cut: {file: bytes to send before the connection
    drops, once}. wrong: {file: other content of the same size that is served instead}. sizes: {file: the size to announce}.
    without_hash: files of which no hash is told (of one in LFS, only its pointer's). pages_for: parts of the paths that are answered with a web page, as a proxy does."""

    def __init__(self):
        self.repos, self.served, self.cut, self.wrong, self.ranges = {}, {}, {}, {}, []
        self.gated, self.has_ranges = set(), True
        self.sizes, self.pages_for, self.without_hash = {}, (), set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                self._answer(False)

            def do_GET(self):
                self._answer(True)

            def _answer(self, body):
                path = self.path.partition("?")[0].lstrip("/")
                if any(part in path for part in hub.pages_for):
                    return self._send(
                        200, b"<!DOCTYPE html><p>Log in", {"Content-Type": "text/html; charset=utf-8"}, body
                    )
                if path.startswith("api/models/"):
                    org, name, *rest = path.removeprefix("api/models/").split("/")
                    return self._model(f"{org}/{name}", rest[1] if rest[:1] == ["revision"] else "main")
                org, name, _, revision, file = path.split("/", 4)
                return self._file(f"{org}/{name}", revision, file, body)

            def _model(self, repo, revision):
                if repo not in hub.repos:
                    return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
                if revision not in ("main", "v1", COMMIT):
                    return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                siblings = []
                for file, data in hub.repos[repo].items():
                    record = {"rfilename": file, "size": hub.sizes.get(file, len(data)), "blobId": blob_id(data)}
                    if file.endswith(LFS_SUFFIXES):
                        record["lfs"] = {
                            "sha256": hashlib.sha256(data).hexdigest(),
                            "size": len(data),
                            "pointerSize": 130,
                        }
                    if file in hub.without_hash:
                        record.get("lfs", {}).pop("sha256", None)
                        record["blobId"] = record["blobId"] if "lfs" in record else None
                    siblings.append(record)
                facts = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0,
                         "likes": 0, "private": False, "cardData": {"license": "mit"}}  # fmt: skip
                return self._send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

            def _file(self, repo, revision, file, body):
                if repo in hub.gated:
                    return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
                data = hub.repos[repo].get(file)
                if data is None:
                    return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                etag = hashlib.sha256(data).hexdigest() if file.endswith(LFS_SUFFIXES) else blob_id(data)
                data = hub.wrong.get(file, data)
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
                start = 0
                wanted = self.headers.get("Range") if hub.has_ranges else None
                if wanted:
                    start = int(wanted.removeprefix("bytes=").split("-")[0])
                    hub.ranges.append((file, start))
                    headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                self._send(206 if wanted else 200, data[start:], headers, body, file)

            def _send(self, status, data, headers, body=True, file=None):
                self.send_response(status)
                for key, value in {"Content-Length": len(data), **headers}.items():
                    self.send_header(key, str(value))
                self.end_headers()
                if not body:
                    return
                limit = hub.cut.pop(file, None)
                data = data[:limit]
                self.wfile.write(data)
                self.wfile.flush()
                hub.served[file] = hub.served.get(file, 0) + len(data)
                if limit is not None:
                    self.close_connection = True
                    hub.on_cut()

            def log_message(self, *args):
                pass

        self.on_cut = lambda: None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
