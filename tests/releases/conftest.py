"""The releases of vLLM, each read and generated from once; tests that ask for `release` run on all.

The sources come from the per-user cache, which the first run fills from the package index.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import pytest
from eplb_codegen.analysis.modules import Module, Modules
from eplb_codegen.families import known_families
from eplb_codegen.generate import Generated, Generator, Result
from eplb_codegen.source import SourceTree, find_source

RELEASES = (
    *("0.9.2", "0.10.0", "0.10.1", "0.10.1.1", "0.10.2", "0.11.0", "0.11.1", "0.11.2"),
    *("0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0", "0.17.0", "0.17.1"),
    *("0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0"),
    *("0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0"),
    *("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)


class Patched(NamedTuple):
    """One patched file; its family by name."""

    family: str
    file: Generated

    @property
    def name(self) -> str:
        return self.file.name


class Release:
    """One release: its tree, its modules parsed once, and what every target comes to."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.number = tuple(map(int, version.split(".")))
        self.tree: SourceTree = find_source(version=version)
        self.modules = Modules(self.tree)

    @cached_property
    def results(self) -> dict[str, Result]:
        generator = Generator(self.tree)
        return {f.name: generator.generate(f) for f in known_families()}

    @property
    def patched(self) -> list[Patched]:
        return [Patched(name, file) for name, r in self.results.items() for file in r.files]

    @property
    def formatted_by_ruff(self) -> bool:
        """The releases whose files are in the style of ruff's formatter; those before, of yapf."""
        return self.number >= (0, 11, 1)

    def module(self, file: Generated, text: str | None = None) -> Module:
        """A generated file (or another text in its place) as a module of the release's tree."""
        name = file.upstream.removesuffix(".py").replace("/", ".")
        return Module(name, file.upstream, file.output if text is None else text)

    @cached_property
    def protocol(self) -> ast.ClassDef:
        """MixtureOfExperts, as the release defines it."""
        interfaces = ast.parse(self.tree.read("vllm/model_executor/models/interfaces.py"))
        return next(
            node
            for node in interfaces.body
            if isinstance(node, ast.ClassDef) and node.name == "MixtureOfExperts"
        )


@pytest.fixture(scope="session", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Iterator[Release]:
    """One after the other: pytest runs all tests of a release before it goes on to the next."""
    yield Release(request.param)


@pytest.fixture(scope="session")
def releases() -> tuple[str, ...]:
    """Every version that `release` goes through."""
    return RELEASES


@pytest.fixture(scope="session")
def the_release() -> dict[str, Release]:
    """Single releases by version, for tests that need one or two in particular."""

    class Releases(dict[str, Release]):
        def __missing__(self, version: str) -> Release:
            self[version] = Release(version)
            return self[version]

    return Releases()
