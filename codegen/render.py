"""Templates: the code that is inserted into model files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_HERE = Path(__file__).parent


@cache
def _environment() -> Environment:
    # beside the package in an installation, beside its folder in a checkout
    folders = [
        folder for folder in (_HERE / "templates", _HERE.parent / "templates") if folder.is_dir()
    ]
    return Environment(
        loader=FileSystemLoader(folders),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is Python
    )


def render(template: str, **values: object) -> str:
    """The text of `templates/<template>.j2` with these values; an undefined one is an error."""
    return _environment().get_template(f"{template}.j2").render(**values)
