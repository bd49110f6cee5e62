"""manifest.toml: what the files of one release's folder are, and what they were made from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from ..errors import EnvironmentFault

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "manifest.toml"
FORMAT = 1


class FileEntry(NamedTuple):
    """One generated file."""

    upstream: str
    upstream_sha256: str
    sha256: str
    architectures: dict[str, str]


class FamilyEntry(NamedTuple):
    """The files of one family; `depends`: the hash of every upstream file the patch relies on."""

    tool_version: str
    files: dict[str, FileEntry]
    depends: dict[str, str]


class Manifest(NamedTuple):
    """The manifest of one folder: OUT/<vllm version>."""

    vllm: str
    families: dict[str, FamilyEntry]

    def recorded(self, name: str) -> str | None:
        """The SHA-256 that a file of the folder should have; None if it is not one of ours."""
        for entry in self.families.values():
            if name in entry.files:
                return entry.files[name].sha256
        return None

    def with_family(self, name: str, entry: FamilyEntry) -> Manifest:
        """The manifest with one family's entry put in or replaced."""
        return Manifest(self.vllm, {**self.families, name: entry})

    def without_family(self, name: str) -> Manifest:
        """The manifest without one family's entry."""
        return Manifest(self.vllm, {n: e for n, e in self.families.items() if n != name})

    def dump(self) -> str:
        """The manifest as TOML, the same text for the same content."""
        families = {
            name: {
                "tool_version": entry.tool_version,
                "files": {
                    file: {
                        "upstream": e.upstream,
                        "upstream_sha256": e.upstream_sha256,
                        "sha256": e.sha256,
                        "architectures": dict(sorted(e.architectures.items())),
                    }
                    for file, e in sorted(entry.files.items())
                },
                "depends": dict(sorted(entry.depends.items())),
            }
            for name, entry in sorted(self.families.items())
        }
        head = "# Written by eplb-codegen: what the files here are, and what they were made from.\n"
        return head + tomli_w.dumps({"format": FORMAT, "vllm": self.vllm, "families": families})


def load(folder: Path, vllm: str) -> Manifest:
    """The manifest of a folder; an empty one if there is none.

    Raises:
        EnvironmentFault: it cannot be read, is of another format, or of another vLLM.
    """
    path = folder / NAME
    advice = f"Move {folder} away, or use another --out."
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Manifest(vllm, {})
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{path} cannot be read: {error}", advice) from None
    try:
        return _parse(table, path, vllm, advice)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise EnvironmentFault(f"{path} is damaged", advice) from None


def _parse(table: dict[str, Any], path: Path, vllm: str, advice: str) -> Manifest:
    if table["format"] != FORMAT:
        raise EnvironmentFault(f"{path} has format {table['format']}, not {FORMAT}", advice)
    if table["vllm"] != vllm:
        raise EnvironmentFault(f"{path} is for vLLM {table['vllm']}, not {vllm}", advice)
    if not _is_plain(table):
        raise ValueError("not written by this tool")
    names = [name for entry in table["families"].values() for name in entry["files"]]
    if any(set(name) & set("/\\:\0") or name in (".", "..") for name in names):
        raise ValueError("not the name of a file in this folder")
    return Manifest(
        vllm,
        {
            name: FamilyEntry(
                entry["tool_version"],
                {
                    file: FileEntry(
                        e["upstream"], e["upstream_sha256"], e["sha256"], dict(e["architectures"])
                    )
                    for file, e in entry["files"].items()
                },
                dict(entry["depends"]),
            )
            for name, entry in table["families"].items()
        },
    )


def _is_plain(value: object) -> bool:
    """Whether there is nothing in it but the number of the format, and text on one line."""
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, str):
        return value.isprintable()
    return type(value) is int and value == FORMAT
