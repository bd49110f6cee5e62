"""The releases of vLLM on the package index, and one of them brought into the cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import ssl
import time
import zipfile
from bisect import bisect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from packaging.version import Version
from unearth import Link, Package, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.collector import is_secure_origin
from unearth.fetchers import PyPIClient

from ..errors import EnvironmentFault
from .archive import faults, unpack_sdist, unpack_wheel
from .cache import cached_versions
from .pipconfig import pip_settings, without_credentials
from .tree import PACKAGE

MAX_DOWNLOAD_BYTES = 200_000_000
"""Bound of a source archive; those of vLLM have up to about 40 MB."""
ATTEMPTS = 3
NO_INDEX = (ValueError, LookupError, TypeError, AttributeError)
"""What unearth raises for a page that is no index."""
TRUE = ("1", "true", "yes", "on")
T = TypeVar("T")


class Index:
    """The package index that pip is configured for, with all of its extra indexes and links."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        """Reads pip's settings; EnvironmentFault if one of them cannot be used."""
        settings = pip_settings()
        self._progress = progress
        links = settings.get("find-links", "").split()
        # As for pip, a folder that is not there is no error.
        self._links = [link for link in links if "://" in link or Path(link).exists()]
        self._indexes = [
            # Without sources, a finder has pip's default index.
            settings.get("index-url") or PackageFinder().sources[0]["url"],
            *settings.get("extra-index-url", "").split(),
        ]
        if settings.get("no-index", "").lower() in TRUE:
            self._indexes = []
        try:
            self._client = _client(settings, self._indexes)
        # ImportError: a proxy of a kind that takes another package
        except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
            raise EnvironmentFault(
                f"pip's settings for the network cannot be used: {without_credentials(str(error))}",
                "Check cert, client-cert, proxy and timeout with `pip config list`.",
            ) from error
        self._unreachable: dict[str, str] = {}  # host -> why
        self._notes = _Notes()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def choose(self, version: Version | None) -> list[Package]:
        """The files of one release: of `version`, or else of the newest.

        The newest is neither yanked nor a pre-release. Raises EnvironmentFault if there is no
        such release, or an index that has to be asked cannot be reached.
        """
        releases: dict[Version, list[Package]] = {}
        for package in self._packages():
            if package.version and package.link.filename.endswith((".tar.gz", ".whl")):
                releases.setdefault(Version(package.version), []).append(package)
        good = sorted(
            v for v, files in releases.items() if not any(f.link.is_yanked for f in files)
        )
        if version in releases:
            if version not in good:
                self._progress(f"vllm {version} is yanked from the package index")
            return releases[version]
        # The newest of only some of the indexes would be another release from day to day.
        stable = [v for v in good if not v.is_prerelease]
        if version is None and stable and not self._unreachable:
            return releases[stable[-1]]
        if self._unreachable:
            host, reason = next(iter(self._unreachable.items()))
            raise unreachable(host, reason)
        what = f"no vllm {version}" if version else "no release of vllm"
        if version and good:
            at = bisect(good, version)
            near = ", ".join(map(str, good[max(0, at - 2) : at + 2]))
            raise EnvironmentFault(
                f"The package index has {what}", f"The nearest releases are {near}."
            )
        asked = ", ".join(map(host_of, [*self._indexes, *self._links]))
        raise EnvironmentFault(
            f"The package index has {what} (asked: {asked})"
            + "".join(f"\n  {note}" for note in self._notes.lines),
            "Check pip's settings with `pip config list`, or use --source.",
        )

    def fetch(self, files: list[Package], target: Path) -> None:
        """Writes the modules of a release that `choose` found below the folder `target`.

        A source archive is preferred; its SHA-256 is checked if the index gives one. Of a
        wheel, which is many times as large, only the needed members are read: see unpack_wheel.
        Raises EnvironmentFault for a file that cannot be had, or is damaged.
        """
        # Any wheel of a release will do, and x86_64 is the platform that vLLM is made on.
        package = min(
            files, key=lambda f: (f.link.is_wheel, "x86_64" not in f.link.filename, f.link.filename)
        )
        link, name = package.link, package.link.filename
        with self._notes:
            secure = is_secure_origin(self._client, link)  # type: ignore[arg-type]
        if not secure:
            raise EnvironmentFault(
                f"{name} would come over an insecure connection from {host_of(link.url)}",
                "Use https, or add the host to pip's trusted-host.",
            )
        archive = link.file_path if link.is_file else target.parent / name
        try:
            with faults(name):
                if link.is_wheel and not link.is_file:
                    with self._attempt(lambda: self._open_remote(package)) as remote:
                        unpack_wheel(remote, name, target)
                    return
                if not link.is_file:
                    self._attempt(lambda: self._download(package, archive))
                self._check_digest(link, archive)
                if link.is_wheel:
                    with zipfile.ZipFile(archive) as wheel:
                        unpack_wheel(wheel, name, target)
                else:
                    unpack_sdist(archive, target)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise unreachable(host_of(link.url), reason_of(error)) from error

    def _packages(self) -> list[Package]:
        found: list[Package] = []
        sources: list[tuple[str, dict[str, list[str]]]] = [
            *((index, {"index_urls": [index]}) for index in self._indexes),
            *((link, {"find_links": [link]}) for link in self._links),
        ]
        # One finder per source: that one cannot be reached need not matter.
        with self._notes:
            for url, source in sources:
                finder = PackageFinder(
                    session=self._client,  # type: ignore[arg-type]  # more general than asked for
                    ignore_compatibility=True,  # nothing of it is run
                    **source,  # type: ignore[arg-type]
                )
                try:
                    found += self._attempt(
                        lambda finder=finder: list(  # type: ignore[misc]
                            finder.find_all_packages(PACKAGE, allow_yanked=True)
                        )
                    )
                except (httpx2.HTTPError, httpx2.InvalidURL, *NO_INDEX) as error:
                    self._unreachable[host_of(url)] = reason_of(error)
        return found

    def _attempt(self, work: Callable[[], T]) -> T:
        """The result of `work`, tried again after an error of the network or the server."""
        for attempt in range(1, ATTEMPTS):
            try:
                return work()
            except httpx2.HTTPStatusError as error:
                if not error.response.is_server_error:
                    raise
            except httpx2.TransportError:
                pass
            time.sleep(attempt * 0.3)
        return work()

    @contextlib.contextmanager
    def _stream(self, link: Link, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        # The bytes as they lie on the server: it is them that the digests and offsets are of.
        headers = {"Accept-Encoding": "identity", **headers}
        with self._client.stream("GET", link.url_without_fragment, headers=headers) as response:
            if response.is_error:
                raise _status_error(response)
            yield response

    def _open_remote(self, package: Package) -> zipfile.ZipFile:
        from .ranges import open_wheel

        link = package.link
        self._progress(f"downloading vllm {package.version} (the Python files of {link.filename})")
        return open_wheel(functools.partial(self._stream, link), host_of(link.url))

    def _download(self, package: Package, archive: Path) -> None:
        size = 0
        with self._stream(package.link, {}) as response, archive.open("wb") as out:
            length = int(response.headers.get("Content-Length", 0))
            about = f" ({length / 1e6:.1f} MB)" if length else ""
            self._progress(f"downloading vllm {package.version}{about}")
            for chunk in response.iter_raw():
                size += len(chunk)
                if max(size, length) > MAX_DOWNLOAD_BYTES:
                    raise EnvironmentFault(
                        f"{archive.name} is larger than {MAX_DOWNLOAD_BYTES / 1e6:.0f} MB",
                        "No source archive of vLLM is; check the index, or use --source.",
                    )
                out.write(chunk)

    def _check_digest(self, link: Link, archive: Path) -> None:
        expected = (link.hash_option or {}).get("sha256")
        if not expected:
            self._progress(f"the package index gives no SHA-256 of {link.filename}")
            return
        digest = hashlib.sha256()
        with archive.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() not in expected:
            raise EnvironmentFault(
                f"{link.filename} from {host_of(link.url)} has the SHA-256 {digest.hexdigest()}, "
                f"but the package index says {expected[0]}",
                "It was not used. Try again; if it stays so, do not trust this index.",
            )


class _Notes(logging.Handler):
    """Keeps what unearth logs of the pages it passes over, for the fault, and off the terminal."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(without_credentials(record.getMessage()))

    def __enter__(self) -> None:
        logging.getLogger("unearth").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("unearth").removeHandler(self)


def _client(settings: dict[str, str], indexes: list[str]) -> PyPIClient:
    """An HTTP client with pip's certificates, proxy, timeout and trusted hosts.

    Credentials are those of the index URLs and of netrc.
    """
    cert, client_cert, proxy = (settings.get(k) for k in ("cert", "client-cert", "proxy"))
    verified = httpx2.create_ssl_context()
    if cert:
        folder = Path(cert).is_dir()
        verified = ssl.create_default_context(
            cafile=None if folder else cert, capath=cert if folder else None
        )
    unverified = httpx2.create_ssl_context(verify=False)
    if client_cert:
        verified.load_cert_chain(client_cert)
        unverified.load_cert_chain(client_cert)
    trusted = settings.get("trusted-host", "").split()
    client = PyPIClient(
        trusted_hosts=trusted,
        # Instead of unearth's own transport for them, which knows neither of proxy nor client-cert.
        mounts={
            f"all://{host}": httpx2.HTTPTransport(verify=unverified, proxy=proxy)
            for host in trusted
        },
        verify=verified,
        proxy=proxy or None,
        timeout=float(settings.get("timeout") or settings.get("default-timeout") or 15),
        follow_redirects=True,
        event_hooks={"response": [_raise_for_status]},
    )
    client.auth = MultiDomainBasicAuth(prompting=False, index_urls=indexes)
    return client


def _raise_for_status(response: httpx2.Response) -> None:
    # unearth takes an index that fails for an empty one; only 404 says that it has no vllm.
    # After 401 it may still find other credentials.
    if response.is_error and response.status_code not in (401, 404):
        raise _status_error(response)


def _status_error(response: httpx2.Response) -> httpx2.HTTPStatusError:
    # httpx2's own message shows the URL, which may hold a token.
    text = f"HTTP status {response.status_code}"
    return httpx2.HTTPStatusError(text, request=response.request, response=response)


def host_of(url: str) -> str:
    """The host, and port if there is one, of a URL, or the path of a local one; no credentials."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def reason_of(error: Exception) -> str:
    """What a user is told of an error of the network."""
    return without_credentials(str(error)) or type(error).__name__


def unreachable(host: str, reason: str) -> EnvironmentFault:
    """The fault for a host that gives no answer; it says what works without one."""
    cached = ", ".join(cached_versions()) or "none so far"
    return EnvironmentFault(
        f"The package index at {host} cannot be reached: {reason}",
        "Check the network and pip's settings. Without a network these work: "
        f"--source, and --vllm with a release in the cache ({cached}).",
    )
