"""Whether the plugin is found, in processes with real metadata of distributions."""

from __future__ import annotations

import os
import re
import site
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eplb_codegen
import pytest

GOOD = "[vllm.general_plugins]\neplb_codegen = eplb_codegen.plugin:register\n"


@pytest.fixture
def bare(tmp_path: Path) -> tuple[str, ...]:
    """A path on which this package can be imported and no distribution of it is installed."""
    folder = tmp_path / "bare"
    (folder / "eplb_codegen").mkdir(parents=True)
    for packages in site.getsitepackages():
        for entry in Path(packages).iterdir():
            if not re.match(r"eplb[_-]codegen|__editable__", entry.name):
                (folder / entry.name).symlink_to(entry)
    root = Path(eplb_codegen.__path__[0])
    # in a checkout the templates stand beside the package
    parts = {p.name: p for p in (root.parent / "templates", *root.iterdir()) if p.exists()}
    for name, part in parts.items():
        (folder / "eplb_codegen" / name).symlink_to(part)
    return (str(folder),)


@pytest.fixture
def distribution(tmp_path: Path) -> Callable[..., str]:
    """Makes a folder for sys.path that holds the metadata of a distribution."""

    def make(kind: str, entry_points: str, name: str = "eplb-codegen") -> str:
        folder = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
        metadata = folder / f"{name.replace('-', '_')}{'-0.1.0' * (kind == 'dist')}.{kind}-info"
        metadata.mkdir(parents=True)
        file = "METADATA" if kind == "dist" else "PKG-INFO"
        (metadata / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        if entry_points:
            (metadata / "entry_points.txt").write_text(entry_points)
        return str(folder)

    return make


@pytest.fixture
def plugin(doctor: Any, bare: tuple[str, ...]) -> Callable[..., tuple[int, str]]:
    """The exit code and the lines about the plugin, with these folders first on sys.path."""

    def run(*folders: str, **env: str) -> tuple[int, str]:
        path = os.pathsep.join([*folders, *bare])
        done = doctor("doctor", python=("-S",), PYTHONPATH=path, **env)
        assert done.code in (0, 1), done
        lines = done.out.splitlines()
        about = [i for i, line in enumerate(lines) if " plugin: " in line]
        with_advice = [
            lines[i + k] for i in about for k in (0, 1) if k == 0 or "->" in lines[i + 1]
        ]
        return done.code, "\n".join(with_advice)

    return run


def test_found(plugin: Callable[..., Any], distribution: Callable[..., str]) -> None:
    code, text = plugin(distribution("dist", GOOD))
    assert code == 0
    assert re.search(
        r"^  ok +plugin: vLLM finds it: eplb_codegen\.plugin:register of .*dist-info", text
    )


def test_not_installed(plugin: Callable[..., Any]) -> None:
    code, text = plugin()
    assert code == 1
    assert re.search(r"problem  plugin: eplb-codegen is not installed in .*python", text)
    assert "pip install eplb-codegen" in text


def test_a_stale_egg_info_hides_it(
    plugin: Callable[..., Any], distribution: Callable[..., str]
) -> None:
    stale, good = distribution("egg", ""), distribution("dist", GOOD)
    code, text = plugin(stale, good)
    assert code == 1
    assert re.search(rf"problem .*{stale}/.*egg-info.* has no entry point.*hides.*{good}/", text)
    assert f"delete {stale}/eplb_codegen.egg-info" in text
    code, text = plugin(good, stale)  # the other way round this process is well off
    assert code == 0
    assert re.search(rf"ok .*finds it.*\n  warning .*{stale}/.*has no such entry point", text)


def test_metadata_of_a_version_without_the_plugin(
    plugin: Callable[..., Any], distribution: Callable[..., str]
) -> None:
    code, text = plugin(distribution("dist", "[console_scripts]\neplb-codegen = x:main\n"))
    assert code == 1
    assert "has no entry point vllm.general_plugins:eplb_codegen\n" in text
    assert "--force-reinstall" in text


def test_an_entry_point_that_leads_nowhere(
    plugin: Callable[..., Any], distribution: Callable[..., str]
) -> None:
    code, text = plugin(distribution("dist", GOOD.replace(".plugin", ".gone")))
    assert code == 1
    assert "eplb_codegen.gone, which the entry point of" in text


@pytest.mark.parametrize(
    "allowed, code, says",
    [
        ("lora_filesystem_resolver", 1, "VLLM_PLUGINS=lora_filesystem_resolver,eplb_codegen"),
        ("", 1, "VLLM_PLUGINS=eplb_codegen,"),
        ("eplb_codegen,other", 0, "VLLM_PLUGINS allows it"),
        ("eplb_codegen", 0, "VLLM_PLUGINS allows it"),
    ],
)
def test_the_list_of_allowed_plugins(
    plugin: Callable[..., Any],
    distribution: Callable[..., str],
    allowed: str,
    code: int,
    says: str,
) -> None:
    found, text = plugin(distribution("dist", GOOD), VLLM_PLUGINS=allowed)
    assert found == code
    assert says in text


def test_other_plugins(plugin: Callable[..., Any], distribution: Callable[..., str]) -> None:
    other = distribution("dist", "[vllm.general_plugins]\nmine = mine:register\n", "my-models")
    code, text = plugin(distribution("dist", GOOD), other)
    assert code == 0
    assert re.search(r"warning  plugin: .* plugin mine of my-models 0\.1\.0 \(.*register", text)
