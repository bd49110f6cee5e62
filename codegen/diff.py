"""Differences between two texts, as `git apply` and `patch` read them."""

from __future__ import annotations

from .analysis.syntax import source_lines


def unified(before: str, after: str, old: str, new: str) -> str:
    """A unified diff of one file; `old` and `new` are its names in the two heading lines."""
    import difflib

    lines = difflib.unified_diff(source_lines(before), source_lines(after), old, new)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def in_colour(diff: str) -> str:
    """A unified diff with the colours of a terminal."""
    colours = {"+": "32", "-": "31", "@": "36"}
    return "".join(
        f"\033[{code}m{line[:-1]}\033[0m\n" if (code := colours.get(line[0])) else line
        for line in source_lines(diff)
    )


def first_difference(before: str, after: str) -> int:
    """The number, from 1, of the first line of `before` that `after` does not have there.

    The last line where only what follows it is new; 1 for texts that are the same.
    """
    old, new = source_lines(before), source_lines(after)
    if old == new:
        return 1
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(new))
    return max(1, min(same + 1, len(old)))


def same_line(before: str, after: str, line: int) -> int:
    """Where a line of `before` stands in `after`; if it is gone, the next one that is there."""
    import difflib

    old, new = source_lines(before), source_lines(after)
    for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        if block.a + block.size >= line:
            return max(1, min(block.b + max(0, line - 1 - block.a) + 1, len(new)))
    return 1
