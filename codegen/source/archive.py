"""Takes the Python files of vLLM out of a release, be it a source archive or a wheel.

Archives are not trusted: only plain files below `vllm/` are written, none of them outside the
target folder, and the amount that is read is bounded. Each function raises EnvironmentFault for
an archive that is damaged or breaks a bound.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import EnvironmentFault
from .tree import MAX_FILE_BYTES, PACKAGE, inner_path, looks_like_vllm

MAX_UNPACKED_BYTES = 400_000_000
"""Bound of what is unpacked in all; vLLM's source archives have up to about 60 MB."""
DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, csv.Error),
    *(EOFError, LookupError, ValueError, RuntimeError),
)
"""What zipfile, tarfile and csv raise for bytes that are not as they should be."""
METADATA = "PKG-INFO"
"""The core metadata is kept under this name, as in source archives."""


def unpack_sdist(archive: Path, target: Path) -> None:
    """Writes `vllm/**/*.py` and PKG-INFO of the `.tar.gz` source archive below `target`."""
    with faults(archive.name), _BoundedGzip(archive) as stream:
        # Mode "r|" reads straight on, so the bound holds for headers and skipped members too.
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                # The first component is the archive's own folder, "vllm-0.10.0".
                name = member.name.partition("/")[2]
                if _is_wanted(name, METADATA) and member.isreg() and not member.issparse():
                    content = tar.extractfile(member)
                    assert content is not None  # it is a plain file
                    _write(target, name, content)
        while stream.read(1 << 20):  # to the end, where gzip keeps its checksum
            pass
    _check(archive.name, target)


def unpack_wheel(wheel: zipfile.ZipFile, name: str, target: Path) -> None:
    """Writes `vllm/**/*.py` and the metadata (as PKG-INFO) of an open wheel below `target`.

    Each file is compared with the SHA-256 in the wheel's own RECORD. This finds damage. It does
    not replace the digest of the whole wheel, which takes all of its bytes to compute.
    """
    with faults(name):
        members = wanted_members(wheel)
        info_folder = next(m.filename[: -len("RECORD")] for m in members if _is_record(m))
        with wheel.open(f"{info_folder}RECORD") as stream:
            record = {row[0]: row[1] for row in csv.reader(io.TextIOWrapper(stream, "utf-8"))}
        for member in members:
            if _is_record(member):
                continue
            kept = member.filename.replace(f"{info_folder}METADATA", METADATA)
            with wheel.open(member) as content:
                digest = _write(target, kept, content)
            expected = "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")
            if record.get(member.filename) != expected:
                raise _fault(name, f"{member.filename} does not have the SHA-256 in its RECORD")
    _check(name, target)


def wanted_members(wheel: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The members that unpack_wheel reads, in the order in which they lie in the wheel."""
    members = [
        member
        for member in wheel.infolist()
        if _is_wanted(member.filename, METADATA) or _is_record(member, "RECORD", "METADATA")
    ]
    if not any(map(_is_record, members)):
        raise zipfile.BadZipFile("it has no RECORD")
    if sum(member.file_size for member in members) > MAX_UNPACKED_BYTES:
        raise _Excess(f"it unpacks to more than {MAX_UNPACKED_BYTES / 1e6:.0f} MB")
    return sorted(members, key=lambda member: member.header_offset)


class _Excess(Exception):
    """A bound of this module is exceeded."""


class _BoundedGzip(gzip.GzipFile):
    """Reads until MAX_UNPACKED_BYTES are exceeded."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > MAX_UNPACKED_BYTES:
            raise _Excess(f"it unpacks to more than {MAX_UNPACKED_BYTES / 1e6:.0f} MB")
        return data


def _is_wanted(name: str, *files: str) -> bool:
    return name in files or (name.startswith(f"{PACKAGE}/") and name.endswith(".py"))


def _is_record(member: zipfile.ZipInfo, *names: str) -> bool:
    folder, _, name = member.filename.partition("/")
    return folder.endswith(".dist-info") and name in (names or ("RECORD",))


def _write(target: Path, name: str, content: IO[bytes]) -> bytes:
    """Writes one file below `target`; its SHA-256."""
    inner = inner_path(name)
    if inner is None:
        raise _Excess(f"its member {name!r} leads out of it")
    data = content.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise _Excess(f"its member {name} is larger than {MAX_FILE_BYTES / 1e6:.0f} MB")
    file = target / inner
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("xb") as out:
        out.write(data)
    return hashlib.sha256(data).digest()


def _fault(name: str, what: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{name} cannot be used: {what}",
        "Nothing of it was kept. Try again; if it stays so, the index holds a bad file: "
        "choose another release, or use --source.",
    )


@contextmanager
def faults(name: str) -> Iterator[None]:
    """Turns what the archive `name` makes its readers raise into an EnvironmentFault.

    Errors of the network and of the disk pass: they are not the archive's.
    """
    try:
        yield
    except _Excess as error:
        raise _fault(name, str(error)) from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise _fault(name, "it has two members of one name") from error
    except gzip.BadGzipFile as error:  # an OSError
        raise _fault(name, f"it is damaged ({error})") from error
    except DAMAGE as error:
        raise _fault(name, f"it is damaged ({error or type(error).__name__})") from error


def _check(name: str, target: Path) -> None:
    if not looks_like_vllm(target):
        raise _fault(name, "there is no vllm/model_executor/models/ in it")
