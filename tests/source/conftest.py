"""A package index on 127.0.0.1 with tiny releases of a package `vllm`."""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FILES = {
    "vllm/__init__.py": b"raise SystemExit('vllm was imported')\n",
    "vllm/config/__init__.py": b"first = 1\r\n",
    "vllm/config.py": b"",
    "vllm/model_executor/models/moe.py": b"class Moe: ...\n",
    "vllm/model_executor/models/table.json": b"{}",
}


def make_tree(root: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def make_sdist(
    version: str, files: dict[str, bytes] = FILES, members: tuple[tarfile.TarInfo, ...] = ()
) -> bytes:
    """A source archive; `members` come before the files, with zeros as their content."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
        metadata = {"PKG-INFO": f"Name: vllm\nVersion: {version}\n\n".encode()}
        for name, data in {**metadata, **files}.items():
            info = tarfile.TarInfo(f"vllm-{version}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def make_wheel(
    version: str,
    files: dict[str, bytes] = FILES,
    record: dict[str, bytes] | None = None,
    padding: int = 0,
) -> bytes:
    """A wheel; `record` holds files whose content RECORD tells differently."""
    info = f"vllm-{version}.dist-info"
    # A large library lies between the modules, as in the real wheels.
    names = list(files)
    everything = {names[0]: files[names[0]], "vllm/_C.abi3.so": os.urandom(padding), **files}
    everything[f"{info}/METADATA"] = f"Name: vllm\nVersion: {version}\n\n".encode()
    lines = io.StringIO()
    for name, data in {**everything, **(record or {})}.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        csv.writer(lines).writerow([name, f"sha256={digest}", len(data)])
    everything[f"{info}/RECORD"] = lines.getvalue().encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in everything.items():
            wheel.writestr(name, data)
    return out.getvalue()


@dataclass
class Index:
    """What the server has, how it behaves, and what was asked of it."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    hashes: dict[str, str | None] = field(default_factory=dict)
    yanked: set[str] = field(default_factory=set)
    html: bool = False
    ranges: bool = True
    login: str = ""
    status: int = 200
    clients: int = 0  # files are sent after so many have asked for the page
    served: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        login = f"{self.login}@" if self.login else ""
        return f"http://{login}127.0.0.1:{self.port}/simple/"

    def add(self, name: str, data: bytes, sha256: str | None = "right") -> None:
        self.files[name] = data
        self.hashes[name] = hashlib.sha256(data).hexdigest() if sha256 == "right" else sha256

    def page(self) -> tuple[str, bytes]:
        if not self.html:
            files = [
                {
                    "filename": name,
                    "url": f"../../files/{name}",
                    "hashes": {"sha256": sha256} if (sha256 := self.hashes[name]) else {},
                    "yanked": name in self.yanked,
                }
                for name in self.files
            ]
            page = {"meta": {"api-version": "1.0"}, "name": "vllm", "files": files}
            return "application/vnd.pypi.simple.v1+json", json.dumps(page).encode()
        lines = "".join(
            f'<a href="../../files/{html.escape(name)}'
            + (f"#sha256={self.hashes[name]}" if self.hashes[name] else "")
            + ('" data-yanked="bad' if name in self.yanked else "")
            + f'">{name}</a>\n'
            for name in self.files
        )
        return "text/html", f"<!DOCTYPE html><html><body>{lines}</body></html>".encode()


def handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = re.sub(r"^http://[^/]*", "", self.path)  # a proxy is asked for whole URLs
            index.requests.append(self.path)
            wanted = "Basic " + base64.b64encode(index.login.encode()).decode()
            if index.login and self.headers.get("Authorization") != wanted:
                self.answer(401, "text/plain", b"who are you?")
            elif index.status != 200:
                self.answer(index.status, "text/plain", b"no")
            elif path == "/simple/vllm/":
                self.answer(200, *index.page())
            elif (name := path.removeprefix("/files/")) in index.files:
                self.file(name)
            else:
                self.answer(404, "text/plain", b"not here")

        def file(self, name: str) -> None:
            while index.requests.count("/simple/vllm/") < index.clients:
                time.sleep(0.01)
            time.sleep(0.5 if index.clients else 0)
            data = index.files[name]
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked and index.ranges:
                start, end = int(asked[1]), int(asked[2]) + 1
                part = data[start:end]
                span = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
                self.answer(206, "application/octet-stream", part, {"Content-Range": span})
            else:
                part = data
                self.answer(200, "application/octet-stream", data)
            index.served[name] = index.served.get(name, 0) + len(part)

        def answer(
            self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            lengths = {"Content-Type": kind, "Content-Length": str(len(body))}
            for key, value in {**lengths, **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    """The index, configured for pip by its environment; the cache is empty."""
    made = Index()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(made))
    made.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    made.stop = stop
    for name in [*os.environ]:
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # pip then reads no configuration file
    # As where pip is not installed: to ask it takes 0.4 s. The tests of its settings do ask it,
    # and so do those that start a process.
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PIP_INDEX_URL", made.url)
    monkeypatch.setenv("EPLB_CODEGEN_CACHE", str(tmp_path / "cache"))
    yield made
    if thread.is_alive():
        stop()


@pytest.fixture
def python() -> Callable[..., subprocess.Popen[str]]:
    """Starts Python code in a process of its own."""

    def start(code: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env={**os.environ, **env},
        )

    return start


@dataclass(frozen=True)
class Make:
    """The builders, for tests that cannot import this file."""

    files: dict[str, bytes]
    tree: Callable[..., Path]
    sdist: Callable[..., bytes]
    wheel: Callable[..., bytes]


@pytest.fixture
def make() -> Make:
    return Make(FILES, make_tree, make_sdist, make_wheel)
