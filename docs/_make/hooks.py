"""What the site needs beside the pages: links to files that are not pages, and the text of `--help`."""

import contextlib
import io
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(
    r"\[([^\]]+)\]\((\.\./)+((?:examples|benchmarks|src|tests|README|CONTRIBUTING|CHANGELOG)[^)#\s]*)[^)]*\)"
)
HELP = re.compile(r"^<!-- help: (.*) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_) -> str:
    """A link out of docs/, which works where the repository is browsed, becomes the file's name."""
    markdown = LINK.sub(lambda m: f"{m[1]} (`{m[3]}` in the repository)" if m[1] != m[3] else f"`{m[3]}`", markdown)
    return HELP.sub(lambda m: f"```text\n{help_of(m[1].split())}\n```", markdown)


def help_of(arguments: list[str]) -> str:
    """What a command's --help prints."""
    from sharpwave.cli import main

    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*arguments, "--help"]) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).strip()
