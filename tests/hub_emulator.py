"""An in-memory Hub with one dataset, `me/set`, on loopback."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping

import pytest

COMMIT = "a" * 40


class Hub(http.server.ThreadingHTTPServer):
  """A server of a dataset's files.

  Attributes:
    files: Contents by path.
    sent: Number of bytes sent of the files.
    most: Number of bytes after which it refuses requests with status 403.
  """

  daemon_threads = True

  def __init__(self, files: Mapping[str, bytes]):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.files = files
    self.sent = 0
    self.most = 1 << 40
    self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers the requests that `datasets` makes."""

  protocol_version = "HTTP/1.1"
  server: Hub

  def log_message(self, *_):
    """Prints nothing."""

  def do_HEAD(self):
    self.do_GET()

  def do_GET(self):
    path = self.path.partition("?")[0]
    if not path.startswith(("/api/datasets/me/set", "/datasets/me/set")):
      self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
    elif "/resolve/" in path:
      self.send_file(path.rpartition("/")[2])
    elif "/tree/" in path:
      entries = [
        {"type": "file", "path": name, "size": len(data), "oid": digest(data)}
        for name, data in self.server.files.items()
      ]
      self.answer(200, json.dumps(entries).encode())
    else:
      siblings = [{"rfilename": name} for name in self.server.files]
      info = {"id": "me/set", "sha": COMMIT, "siblings": siblings}
      info |= {"private": False, "tags": [], "downloads": 0, "likes": 0}
      self.answer(200, json.dumps(info).encode())

  def send_file(self, name: str) -> None:
    """Sends the bytes that a request's range asks for."""
    headers = {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
    if name not in self.server.files:
      self.answer(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
      return
    data = self.server.files[name]
    headers["ETag"] = f'"{digest(data)}"'
    bounds = self.headers.get("Range", "").removeprefix("bytes=").split("-")
    begin = int(bounds[0] or 0)
    end = min(int(bounds[-1] or len(data)) + 1, len(data))
    status = 200
    if bounds[0]:
      status = 206
      headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
    if self.command == "GET":
      self.server.sent += end - begin
    if self.server.sent > self.server.most:
      self.answer(403, b"")
      return
    self.answer(status, data[begin:end], headers)

  def answer(
    self, status: int, body: bytes, headers: Mapping[str, str] = {}
  ) -> None:
    self.send_response(status)
    self.send_header("Content-Length", str(len(body)))
    for name, value in headers.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)


def digest(data: bytes) -> str:
  return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def serving(
  files: Mapping[str, bytes], cache, patch: pytest.MonkeyPatch
) -> Iterator[Hub]:
  """Serves files to `datasets` and `huggingface_hub` of this process."""
  import datasets
  import huggingface_hub

  with Hub(files) as hub:
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    constants = huggingface_hub.constants
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    # datasets may have been imported by a test without a network.
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache / "sets"))
    yield hub
    hub.shutdown()
