"""No output changes without lock.toml, which is reviewed with the change."""

from __future__ import annotations

from typing import Any

import pytest
import release_lock

AGAIN = "lock.toml is behind: `./dev session lock`, and commit it if the change is meant"


@pytest.fixture(scope="module")
def lock() -> dict[str, dict[str, list[str]]]:
    return release_lock.load()


def test_outputs_are_as_locked(release: Any, lock: dict[str, dict[str, list[str]]]) -> None:
    found = {name: release_lock.entry(result) for name, result in release.results.items()}
    locked = {name: releases.get(release.version) for name, releases in lock.items()}
    assert found == locked, AGAIN


def test_nothing_else_is_locked(
    lock: dict[str, dict[str, list[str]]], releases: tuple[str, ...]
) -> None:
    assert all(tuple(locked) == releases for locked in lock.values()), AGAIN
    assert release_lock.dump(lock) == release_lock.PATH.read_text(), AGAIN
