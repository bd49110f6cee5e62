"""lock.toml: of every family in every release what it is, and hashes of what goes in and comes out.

    python tests/releases/release_lock.py    # writes it anew; `./dev session lock` does the same

A change of the tool that changes an output shows here, release by release, for whoever reviews it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eplb_codegen.generate import Result
from eplb_codegen.output.manifest import tomllib
from eplb_codegen.output.writer import digest

PATH = Path(__file__).with_name("lock.toml")
Entry = list[str]
"""The state and, where files are generated, 16 digits each of the hash of upstream's files and of
the generated ones."""


def entry(result: Result) -> Entry:
    """The entry of a family in one release."""
    if not result.files:
        return [result.state.value]
    hashes = (
        digest("".join(digest(text) for text in texts))[:16]
        for texts in ([f.original for f in result.files], [f.output for f in result.files])
    )
    return [result.state.value, *hashes]


def load() -> dict[str, dict[str, Entry]]:
    """Family -> release -> entry."""
    return tomllib.loads(PATH.read_text(encoding="utf-8"))


def dump(entries: Mapping[str, Mapping[str, Entry]]) -> str:
    """A line for each family in each release, in the order given."""
    lines = ["# Written by `./dev session lock`: state, upstream's files, generated files."]
    for family, releases in entries.items():
        lines += ["", f"[{family}]"]
        for release, values in releases.items():
            listed = ", ".join(f'"{value}"' for value in values)
            lines.append(f'"{release}" = [{listed}]')
    return "\n".join(lines) + "\n"


def main() -> None:
    """Generate everything, and write the lock."""
    from conftest import RELEASES, Release

    made = {release: Release(release).results for release in RELEASES}
    families = made[RELEASES[-1]]
    table = {f: {r: entry(results[f]) for r, results in made.items()} for f in families}
    PATH.write_text(dump(table), encoding="utf-8")


if __name__ == "__main__":
    main()
