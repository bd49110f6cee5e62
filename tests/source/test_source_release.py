"""Releases from a package index, and the cache they are kept in."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.errors import EnvironmentFault
from eplb_codegen.source import archive, cached_versions, find_source
from eplb_codegen.source import index as index_module
from eplb_codegen.source.pipconfig import pip_settings

SDIST = "vllm-1.0.0.tar.gz"
WHEEL = "vllm-1.0.0-cp38-abi3-manylinux_2_31_x86_64.whl"
RUN = "from eplb_codegen.source import find_source; print(find_source(version='1.0.0').version)"


def fault_of(version: str = "1.0.0") -> str:
    with pytest.raises(EnvironmentFault) as fault:
        find_source(version=version)
    assert fault.value.message and fault.value.advice
    return str(fault.value)


def stored(folder: Path) -> list[str]:
    """The files below the cache other than locks."""
    files = (p for p in folder.rglob("*") if p.is_file() or p.is_symlink())
    return sorted(p.relative_to(folder).as_posix() for p in files if p.suffix != ".lock")


ENTRY = [
    "1.0.0/PKG-INFO",
    "1.0.0/complete",
    "1.0.0/vllm/__init__.py",
    "1.0.0/vllm/config.py",
    "1.0.0/vllm/config/__init__.py",
    "1.0.0/vllm/model_executor/models/moe.py",
]


@pytest.mark.parametrize("html", [False, True])
@pytest.mark.parametrize("name", [SDIST, WHEEL])
def test_release_is_kept_for_use_without_network(
    tmp_path: Path, make: Any, index: Any, html: bool, name: str
) -> None:
    index.html = html
    index.add(name, make.sdist("1.0.0") if name == SDIST else make.wheel("1.0.0"))
    lines: list[str] = []
    tree = find_source(version="1.0.0", progress=lines.append)
    assert (tree.version, tree.origin) == ("1.0.0", "vLLM 1.0.0 from the package index")
    assert tree.read("vllm/model_executor/models/moe.py") == "class Moe: ...\n"
    assert stored(tmp_path / "cache") == ENTRY
    assert len(lines) == 1 and lines[0].startswith("downloading vllm 1.0.0 (")

    index.stop()
    assert find_source(version="1.0", progress=lines.append) == tree
    assert len(lines) == 1
    assert cached_versions() == ["1.0.0"]
    assert find_source(source=tree.root).version == "1.0.0"


def test_source_archive_is_preferred(make: Any, index: Any) -> None:
    index.add(WHEEL, make.wheel("1.0.0"))
    index.add(SDIST, make.sdist("1.0.0"))
    find_source(version="1.0.0")
    assert [*index.served] == [SDIST]


@pytest.mark.parametrize("html", [False, True])
def test_choice(make: Any, index: Any, html: bool) -> None:
    index.html = html
    versions = ["0.9.2", "0.10.0", "0.10.1", "0.11.0", "0.12.0rc1", "0.5.0"]
    for version in versions:
        index.add(f"vllm-{version}.tar.gz", make.sdist(version))
    index.yanked.add("vllm-0.11.0.tar.gz")
    index.add("vllm_ascend-2.tar.gz", b"")
    lines: list[str] = []
    assert find_source(version="latest").version == "0.10.1"
    assert find_source(version="0.12.0rc1").version == "0.12.0rc1"
    assert find_source(version="0.11.0", progress=lines.append).version == "0.11.0"
    assert "vllm 0.11.0 is yanked from the package index" in lines
    assert cached_versions() == ["0.10.1", "0.11.0", "0.12.0rc1"]
    message = fault_of("0.10.0.post1")
    assert "no vllm 0.10.0.post1" in message
    assert "0.9.2, 0.10.0, 0.10.1, 0.12.0rc1" in message
    assert "'../1' is not a version" in fault_of("../1")


def test_digest(tmp_path: Path, make: Any, index: Any) -> None:
    index.add(SDIST, make.sdist("1.0.0"), sha256="0" * 64)
    assert f"but the package index says {'0' * 64}" in fault_of()
    assert stored(tmp_path / "cache") == []
    index.hashes[SDIST] = None
    lines: list[str] = []
    find_source(version="1.0.0", progress=lines.append)
    assert lines[1:] == [f"the package index gives no SHA-256 of {SDIST}"]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> Any:
    info = tarfile.TarInfo(f"vllm-1.0.0/{name}")
    info.type, info.linkname, info.size = kind, link, size
    return info


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (member("vllm/../../../evil.py"), "leads out of it"),
        (member("vllm/..\\..\\evil.py"), "leads out of it"),
        (member("vllm/C:evil.py"), "leads out of it"),
        (member("vllm/large.py", size=4_000_001), "large.py is larger than 4 MB"),
        (member("data.bin", size=6_000_000), "unpacks to more than 5 MB"),
        (member("vllm/config.py"), "two members of one name"),
        (member("vllm/config.py/x.py"), "two members of one name"),
    ],
)
def test_hostile_source_archive(
    tmp_path: Path,
    make: Any,
    index: Any,
    monkeypatch: pytest.MonkeyPatch,
    extra: tarfile.TarInfo,
    message: str,
) -> None:
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 5_000_000)
    index.add(SDIST, make.sdist("1.0.0", members=(extra,)))
    assert message in fault_of()
    assert stored(tmp_path) == []


def test_links_and_devices_are_passed_over(tmp_path: Path, make: Any, index: Any) -> None:
    (tmp_path / "secret.py").touch()
    outside = str(tmp_path)
    links = (
        member("vllm/device.py", tarfile.FIFOTYPE),
        member("vllm/hard.py", tarfile.LNKTYPE, f"{outside}/secret.py"),
        member("vllm/soft.py", tarfile.SYMTYPE, f"{outside}/secret.py"),
        member("vllm/folder.py", tarfile.SYMTYPE, outside),
        member("vllm/folder.py/evil.py"),
    )
    index.add(SDIST, make.sdist("1.0.0", members=links))
    root = find_source(version="1.0.0").root
    assert stored(tmp_path) == sorted(
        ["secret.py", "cache/1.0.0/vllm/folder.py/evil.py", *(f"cache/{name}" for name in ENTRY)]
    )
    assert not any(path.is_symlink() for path in root.rglob("*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "it is damaged"),
        (lambda data: data[:-6] + b"\0\0\0\0\0\0", "it is damaged"),
        (lambda data: b"<html>" + data, "it is damaged"),
        (lambda data: b"", "it is damaged"),
        (lambda data: make_empty(), "no vllm/model_executor/models/ in it"),
    ],
)
def test_damaged_source_archive(
    tmp_path: Path, make: Any, index: Any, change: Callable[[bytes], bytes], message: str
) -> None:
    index.add(SDIST, change(make.sdist("1.0.0")), sha256=None)
    assert message in fault_of()
    assert stored(tmp_path) == []


def make_empty() -> bytes:
    import io

    out = io.BytesIO()
    tarfile.open(fileobj=out, mode="w:gz").close()
    return out.getvalue()


def test_too_large_download(make: Any, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_DOWNLOAD_BYTES", 100)
    index.add(SDIST, make.sdist("1.0.0"))
    assert "is larger than" in fault_of()


def test_of_a_wheel_only_the_modules_are_read(make: Any, index: Any) -> None:
    index.add(WHEEL, make.wheel("1.0.0", padding=5_000_000))
    find_source(version="1.0.0")
    assert 0 < index.served[WHEEL] < 100_000
    assert len([r for r in index.requests if WHEEL in r]) <= 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda make: make.wheel("1.0.0", record={"vllm/config.py": b"x"}), "does not have the"),
        (
            lambda make: make.wheel("1.0.0", {**make.files, "vllm/../../evil.py": b""}),
            "leads out of it",
        ),
        (
            lambda make: make.wheel("1.0.0", {**make.files, "vllm/large.py": bytes(4_000_001)}),
            "large.py is larger than 4 MB",
        ),
        (
            lambda make: make.wheel(
                "1.0.0", {**make.files, **{f"vllm/{i}.py": bytes(3_000_000) for i in "ab"}}
            ),
            "unpacks to more than 5 MB",
        ),
        (lambda make: make.wheel("1.0.0")[:-30], "it is damaged"),
        (lambda make: make.wheel("1.0.0").replace(b"PK\1\2", b"PK\7\7", 1), "it is damaged"),
        (lambda make: make.wheel("1.0.0").replace(b".dist-info", b".dist-oops"), "no RECORD"),
        (lambda make: b"<html>", "it is damaged"),
    ],
)
def test_hostile_or_damaged_wheel(
    tmp_path: Path,
    make: Any,
    index: Any,
    monkeypatch: pytest.MonkeyPatch,
    data: Callable[[Any], bytes],
    message: str,
) -> None:
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 5_000_000)
    index.add(WHEEL, data(make))
    assert message in fault_of()
    assert stored(tmp_path) == []


def test_wheel_from_a_server_without_ranges(make: Any, index: Any) -> None:
    index.ranges = False
    index.add(WHEEL, make.wheel("1.0.0"))
    assert f"127.0.0.1:{index.port} does not answer range requests" in fault_of()


def test_find_links(tmp_path: Path, make: Any, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / SDIST).write_bytes(make.sdist("1.0.0"))
    (tmp_path / WHEEL.replace("1.0.0", "2.0.0")).write_bytes(make.wheel("2.0.0"))
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} {tmp_path}/none")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lines: list[str] = []
    assert find_source(version="1.0.0", progress=lines.append).version == "1.0.0"
    assert find_source(version="latest", progress=lines.append).version == "2.0.0"
    assert not [line for line in lines if "downloading" in line]
    assert index.requests == []


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_no_network(
    make: Any, index: Any, monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    index.add(SDIST, make.sdist("1.0.0"))
    dead = f"http://user:hidden@127.0.0.1:{closed_port}/simple/"
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", dead)
    # A release that another index has is had; but nobody knows if it is the newest.
    find_source(version="1.0.0")
    for version in ("latest", "2.0.0"):
        message = fault_of(version)
        assert f"127.0.0.1:{closed_port} cannot be reached" in message
        assert "--source" in message and "in the cache (1.0.0)" in message
        assert "hidden" not in message


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, "HTTP status 403"), (503, "HTTP status 503"), (404, "no vllm 1.0.0")],
)
def test_status(make: Any, index: Any, status: int, message: str) -> None:
    index.add(SDIST, make.sdist("1.0.0"))
    index.status = status
    assert message in fault_of()


@pytest.mark.parametrize("name", [SDIST, WHEEL])
def test_file_is_gone(make: Any, index: Any, name: str) -> None:
    index.add(name, b"")
    page = index.page()
    index.page = lambda: page
    del index.files[name]
    assert "HTTP status 404" in fault_of()


def test_credentials_work_and_are_not_shown(
    make: Any, index: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    index.login = "user:hidden"
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_FIND_LINKS", f"{index.url}none/")
    index.add(SDIST, make.sdist("1.0.0"))
    index.add(WHEEL.replace("1.0.0", "2.0.0"), make.wheel("2.0.0"))
    index.add("vllm-3.0.0.tar.gz", make.sdist("3.0.0"), sha256="0" * 64)
    shown: list[str] = []
    for version in ("1.0.0", "2.0.0"):
        find_source(version=version, progress=shown.append)
    shown += [fault_of("3.0.0"), fault_of("4.0.0")]
    index.login = "other:login"
    shown.append(fault_of("5.0.0"))
    assert "401" in shown[-1]
    index.login, index.status = "user:hidden", 500
    shown.append(fault_of("5.0.0"))
    shown += capfd.readouterr()
    assert "hidden" not in "".join(shown)


def test_insecure_index_and_proxy(make: Any, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add(SDIST, make.sdist("1.0.0"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple/")
    monkeypatch.setenv("PIP_PROXY", f"http://127.0.0.1:{index.port}")
    assert "not being trusted" in fault_of()
    monkeypatch.setenv("PIP_TRUSTED_HOST", "index.invalid")
    find_source(version="1.0.0")
    assert f"http://index.invalid/files/{SDIST}" in index.requests


def test_insecure_file(make: Any, index: Any) -> None:
    index.add(SDIST, make.sdist("1.0.0"))
    kind, page = index.page()
    index.page = lambda: (kind, page.replace(b"../../files", b"http://index.invalid/files"))
    assert "an insecure connection from index.invalid" in fault_of()


def test_no_index(index: Any) -> None:
    index.page = lambda: ("application/vnd.pypi.simple.v1+json", b"[]")
    assert "cannot be reached" in fault_of()


@pytest.mark.parametrize(
    "name, value",
    [
        *((name, "/none:none") for name in ("PIP_CERT", "PIP_CLIENT_CERT", "PIP_PROXY")),
        ("PIP_PROXY", "socks5://127.0.0.1:1"),
    ],
)
def test_bad_setting(index: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert "settings for the network cannot be used" in fault_of()


def test_pip_settings(tmp_path: Path, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pip_settings()["index-url"] == index.url
    monkeypatch.delitem(sys.modules, "pip")
    config = tmp_path / "pip.conf"
    config.write_text("[global]\ntimeout = 3\nextra-index-url = a\n    b\nindex-url = c\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    settings = pip_settings()
    assert settings["index-url"] == index.url  # the environment comes before the files
    assert settings["extra-index-url"].split() == ["a", "b"]
    assert settings["timeout"] == "3"
    config.write_text("https://user:hidden@127.0.0.1/")
    with pytest.raises(
        EnvironmentFault, match=r"(?s)pip cannot read .*//\*\*\*@127.0.0.1/"
    ) as fault:
        pip_settings()
    assert "hidden" not in str(fault.value)


def test_unusable_cache(
    tmp_path: Path, make: Any, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EPLB_CODEGEN_CACHE", str(tmp_path / "file/cache"))
    index.add(SDIST, make.sdist("1.0.0"))
    message = fault_of()
    assert "file/cache cannot be written" in message and "EPLB_CODEGEN_CACHE" in message


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "complete").unlink(),
        lambda entry: (entry / "complete").write_bytes(b"\xff"),
        lambda entry: (entry / "vllm/config.py").unlink(),
        lambda entry: (entry / "vllm/model_executor/models/moe.py").write_text(""),
    ],
)
def test_damaged_entry_is_replaced(
    tmp_path: Path, make: Any, index: Any, damage: Callable[[Path], Any]
) -> None:
    index.add(SDIST, make.sdist("1.0.0"))
    tree = find_source(version="1.0.0")
    damage(tree.root)
    assert cached_versions() == []
    assert find_source(version="1.0.0") == tree
    assert stored(tmp_path / "cache") == ENTRY


def test_killed_process(tmp_path: Path, make: Any, index: Any, python: Any) -> None:
    index.add(SDIST, make.sdist("1.0.0"))
    # It stops for ever when it has written the first two files.
    slow = (
        "import time; from eplb_codegen.source import archive; write = archive._write\n"
        "def _write(target, name, content):\n"
        "    write(target, name, content)\n"
        "    if name.endswith('.py'): print('written', flush=True); time.sleep(600)\n"
        "archive._write = _write\n"
    )
    process = python(slow + RUN)
    assert process.stdout.readline() == "written\n"
    assert cached_versions() == []
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert any(".partial-1.0.0-" in name for name in stored(tmp_path / "cache"))
    find_source(version="1.0.0")
    assert stored(tmp_path / "cache") == ENTRY


def test_two_processes(tmp_path: Path, make: Any, index: Any, python: Any) -> None:
    index.clients = 2  # thus the second is at work when the first has not got its file
    index.add(SDIST, make.sdist("1.0.0"))
    processes = [python(RUN) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["1.0.0\n"] * 2
    assert index.served[SDIST] == len(index.files[SDIST])
    assert stored(tmp_path / "cache") == ENTRY


def test_cached_release_needs_no_network_library(make: Any, index: Any, python: Any) -> None:
    index.add(SDIST, make.sdist("1.0.0"))
    find_source(version="1.0.0")
    heavy = ("unearth", "httpx2", "remotezip", "requests", "filelock", "ssl", "asyncio")
    code = f"{RUN}; import sys; print([m for m in {heavy} if m in sys.modules])"
    assert python(code).communicate(timeout=60)[0] == "1.0.0\n[]\n"
