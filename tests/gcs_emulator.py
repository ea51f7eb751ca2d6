"""An in-memory bucket with the part of Cloud Storage's JSON API that we use.

gcsfs and Google's client find it by STORAGE_EMULATOR_HOST, tensorstore by
TENSORSTORE_GCS_HTTP_URL. `Emulator.environment` has both. Other requests are
answered with status 501.
"""

import base64
import hashlib
import http
import http.server
import itertools
import json
import re
import threading
import time
import urllib.parse

_OBJECT = re.compile(r"(?:/download)?(?:/storage/v1)?/b/([^/]+)/o/([^/]+)")
_REWRITE = re.compile(
  r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)"
)
_MOVE = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)")
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o/?")
_BUCKET = re.compile(r"/storage/v1/b/([^/]+)/?")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o/?")


class Refused(Exception):
  """A request that is answered with an HTTP error status."""


class Emulator:
  """A threaded server of buckets on a loopback port.

  Attributes:
    buckets: `{bucket: {name: (bytes, generation)}}`.
    forbid: Function of the method and the object's name, or /BUCKET, that
      returns the HTTP status to refuse the request with. True is 403, and
      False accepts it.
    log: Every request, as `METHOD path`.
    sent: Number of bytes sent of objects.
  """

  def __init__(self, *buckets: str):
    self.buckets: dict[str, dict] = {name: {} for name in buckets}
    self.forbid = lambda method, name: False
    self.log: list[str] = []
    self.sent = 0
    self.uploads: dict[str, tuple[str, str, bytearray]] = {}
    self.generations = itertools.count(int(time.time() * 1e6))
    self.lock = threading.RLock()
    handler = type("Handler", (_Handler,), {"emulator": self})
    self.server = _Server(("127.0.0.1", 0), handler)
    self.url = f"http://127.0.0.1:{self.server.server_port}"
    self.thread = threading.Thread(
      target=self.server.serve_forever, kwargs={"poll_interval": 0.05}
    )
    self.thread.start()

  @property
  def environment(self) -> dict[str, str]:
    """Environment variables that make clients use this server."""
    return {
      "STORAGE_EMULATOR_HOST": self.url,
      "TENSORSTORE_GCS_HTTP_URL": self.url,
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # tensorstore's
      "NO_GCE_CHECK": "true",
      # Otherwise gcsfs asks for the bucket's kind by gRPC.
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }

  def close(self) -> None:
    """Stops the server."""
    self.server.shutdown()
    self.server.server_close()
    self.thread.join()

  def names(self, bucket: str) -> list[str]:
    """Returns the names of a bucket's objects."""
    with self.lock:
      return sorted(self.buckets[bucket])

  def objects(self, bucket: str) -> dict:
    """Returns a bucket's objects, or raises `Refused` for an unknown bucket."""
    if bucket not in self.buckets:
      raise Refused(404, "The specified bucket does not exist.")
    return self.buckets[bucket]

  def put(self, bucket: str, name: str, data: bytes, query) -> dict:
    """Stores an object if its generation is as the request expects."""
    there = self.objects(bucket)
    expected = query.get("ifGenerationMatch")
    found = there[name][1] if name in there else 0
    if expected is not None and int(expected) != found:
      raise Refused(412, "conditionNotMet")
    there[name] = data, next(self.generations)
    return self.about(bucket, name)

  def about(self, bucket: str, name: str) -> dict:
    """Returns an object's metadata in the API's form."""
    data, generation = self.objects(bucket)[name]
    stamp = "2026-01-01T00:00:00.000Z"
    return {
      "kind": "storage#object",
      "id": f"{bucket}/{name}/{generation}",
      "name": name,
      "bucket": bucket,
      "generation": str(generation),
      "metageneration": "1",
      "contentType": "application/octet-stream",
      "timeCreated": stamp,
      "updated": stamp,
      "storageClass": "STANDARD",
      "size": str(len(data)),
      "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
      "etag": str(generation),
    }

  def listing(self, bucket: str, query) -> dict:
    """Returns a page of names with a prefix, cut at a delimiter if given."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    start = max(query.get("startOffset", ""), query.get("pageToken", ""))
    end = query.get("endOffset")
    items, prefixes = [], []
    for name in sorted(self.objects(bucket)):
      if not name.startswith(prefix) or name < start or (end and name >= end):
        continue
      cut = name.find(delimiter, len(prefix)) if delimiter else -1
      if cut >= 0:
        folder = name[: cut + len(delimiter)]
        if folder not in prefixes:
          prefixes.append(folder)
      elif len(items) == int(query.get("maxResults", 1000)):
        return {"items": items, "prefixes": prefixes, "nextPageToken": name}
      else:
        items.append(self.about(bucket, name))
    return {"kind": "storage#objects", "items": items, "prefixes": prefixes}


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True

  def handle_error(self, request, client_address):
    """Ignores clients that have disconnected."""


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  emulator: Emulator

  def setup(self):
    super().setup()
    self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY

  def log_message(self, *args):
    """Prints nothing, because `Emulator.log` has the requests."""

  def handle_any(self):
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    try:
      with self.emulator.lock:
        status, headers, data = self._answer(self.command, self.path, body)
    except Refused as error:
      status, message = error.args
      headers = {"Content-Type": "application/json"}
      data = json.dumps(
        {"error": {"code": status, "message": message}}
      ).encode()
    self._send(status, headers, data)

  def _send(self, status: int, headers: dict[str, str], data: bytes):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    if status not in (204, 304):
      self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  do_GET = do_POST = do_PUT = do_DELETE = handle_any

  def _answer(self, method: str, target: str, body: bytes):
    url = urllib.parse.urlsplit(target)
    query = dict(urllib.parse.parse_qsl(url.query))
    self.emulator.log.append(f"{method} {urllib.parse.unquote(url.path)}")
    routes = (
      (_UPLOAD, self._upload),
      (_REWRITE, self._rewrite),
      (_MOVE, self._move),
      (_LIST, self._list),
      (_OBJECT, self._object),
      (_BUCKET, self._bucket),
    )
    for pattern, answer in routes:
      if found := pattern.fullmatch(url.path):
        names = [urllib.parse.unquote(part) for part in found.groups()]
        return answer(method, query, body, *names)
    raise Refused(501, f"not emulated: {method} {target}")

  def _check(self, method: str, name: str) -> None:
    status = self.emulator.forbid(method, name)
    if status is True:
      raise Refused(403, f"no right to {method} {name}")
    if status:
      raise Refused(status, http.HTTPStatus(status).phrase)

  def _json(self, value, status: int = 200, **headers):
    headers |= {"Content-Type": "application/json"}
    return status, headers, json.dumps(value).encode()

  def _bucket(self, method, query, body, bucket):
    self.emulator.objects(bucket)
    self._check("GET", f"/{bucket}")
    return self._json({"kind": "storage#bucket", "name": bucket, "id": bucket})

  def _list(self, method, query, body, bucket):
    self._check("GET", query.get("prefix", ""))
    return self._json(self.emulator.listing(bucket, query))

  def _object(self, method, query, body, bucket, name):
    self._check(method, name)
    there = self.emulator.objects(bucket)
    if name not in there:
      raise Refused(404, f"No such object: {bucket}/{name}")
    data, generation = there[name]
    if method == "DELETE":
      del there[name]
      return 204, {}, b""
    if query.get("ifGenerationNotMatch") == str(generation):
      return 304, {}, b""
    if query.get("ifGenerationMatch") not in (None, str(generation)):
      raise Refused(412, "conditionNotMet")
    if query.get("alt") != "media":
      return self._json(self.emulator.about(bucket, name))
    return self._media(data, generation)

  def _media(self, data: bytes, generation: int):
    headers = {
      "Content-Type": "application/octet-stream",
      "x-goog-generation": str(generation),
    }
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
    if not asked or asked.group() == "bytes=-":
      return 200, headers, data
    first, last = asked.groups()
    if not first:
      start, stop = max(len(data) - int(last), 0), len(data)
    else:
      start, stop = int(first), min(int(last or len(data)) + 1, len(data))
    if start >= len(data):
      raise Refused(416, "the range is outside of the object")
    self.emulator.sent += stop - start
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    return 206, headers, data[start:stop]

  def _rewrite(self, method, query, body, bucket, name, to_bucket, to_name):
    self._check("POST", to_name)
    there = self.emulator.objects(bucket)
    if name not in there:
      raise Refused(404, f"No such object: {bucket}/{name}")
    about = self.emulator.put(to_bucket, to_name, there[name][0], query)
    return self._json({"done": True, "resource": about})

  def _move(self, method, query, body, bucket, name, to_name):
    answer = self._rewrite(method, query, body, bucket, name, bucket, to_name)
    del self.emulator.objects(bucket)[name]
    return self._json(json.loads(answer[2])["resource"])

  def _upload(self, method, query, body, bucket):
    if query["uploadType"] == "resumable":
      return self._resumable(method, query, body, bucket)
    name = query["name"]
    self._check("POST", name)
    return self._json(self.emulator.put(bucket, name, body, query))

  def _resumable(self, method, query, body, bucket):
    uploads = self.emulator.uploads
    if "upload_id" not in query:
      name = query.get("name") or json.loads(body)["name"]
      self._check("POST", name)
      self.emulator.objects(bucket)
      uploads[key := str(next(self.emulator.generations))] = name, bytearray()
      place = f"{self.emulator.url}{self.path}&upload_id={key}"
      return self._json({}, Location=place)
    name, received = uploads[query["upload_id"]]
    received += body
    if self.headers["Content-Range"].endswith("/*"):
      return 308, {"Range": f"bytes=0-{len(received) - 1}"}, b""
    del uploads[query["upload_id"]]
    return self._json(self.emulator.put(bucket, name, bytes(received), query))
