"""The text of one vLLM source tree, read file by file and never imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..errors import EnvironmentFault

PACKAGE = "vllm"
MAX_FILE_BYTES = 4_000_000
"""A larger file is no Python module of vLLM (its largest has about 0.3 MB)."""


def looks_like_vllm(root: Path) -> bool:
    """Whether `root` holds the package `vllm` with its model files, not just the name."""
    package = root / PACKAGE
    return (package / "__init__.py").is_file() and (package / "model_executor/models").is_dir()


def inner_path(name: str) -> PurePosixPath | None:
    """`name` as a relative POSIX path, or None where it could leave the folder it is put in.

    Backslashes and colons are refused too: Windows reads them as separators and drives.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or set(name) & set("\\:\0"):
        return None
    return path


@dataclass(frozen=True)
class SourceTree:
    """A folder that holds vLLM, with the version it is of and where it came from."""

    root: Path
    """The folder that holds the package folder `vllm/`."""
    version: str
    """A PEP 440 version such as "0.10.0"; safe as the name of a folder."""
    origin: str
    """For people: "vLLM 0.10.0 from the package index", "checkout /src/vllm", ..."""

    def read(self, path: str) -> str:
        """The text of the file at `path`, a POSIX path below `root`; newlines stay as they are.

        Raises EnvironmentFault for a path that leads out of `root`, a file that cannot be read,
        one above 4 MB (MAX_FILE_BYTES), and one that is not UTF-8.
        """
        inner = inner_path(path)
        if inner is None:
            raise EnvironmentFault(
                f"{path!r} is not a path inside the vLLM source at {self.root}",
                "Give a relative path with forward slashes and without '..'.",
            )
        file = self.root / inner
        try:
            with file.open("rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise EnvironmentFault(
                f"{file} cannot be read: {error.strerror or error}",
                f"The source in use is {self.origin}; check that it is complete and readable.",
            ) from error
        if len(data) > MAX_FILE_BYTES:
            raise EnvironmentFault(
                f"{file} is larger than {MAX_FILE_BYTES / 1e6:.0f} MB",
                "No Python file of vLLM is; check where this source comes from.",
            )
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise EnvironmentFault(
                f"{file} is not UTF-8 text (byte {error.start})",
                f"The source in use is {self.origin}; restore the file.",
            ) from error

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder at `path`, a POSIX path below `root`."""
        inner = inner_path(path)
        return inner is not None and (self.root / inner).exists()

    def module_path(self, module: str) -> str | None:
        """The path of a dotted module name, or None if the tree has no such module.

        A package comes before a module of the same name, as in Python's import.
        """
        parts = module.split(".")
        if not all(part.isidentifier() for part in parts):
            return None
        stem = "/".join(parts)
        candidates = (f"{stem}/__init__.py", f"{stem}.py")
        return next((path for path in candidates if (self.root / path).is_file()), None)


@dataclass(frozen=True)
class Overlay(SourceTree):
    """A tree in which some files have another text."""

    texts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: SourceTree, texts: dict[str, str]) -> Overlay:
        """`texts`: path -> text."""
        return cls(tree.root, tree.version, tree.origin, texts)

    def read(self, path: str) -> str:
        return self.texts[path] if path in self.texts else super().read(path)
