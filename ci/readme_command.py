#!/usr/bin/env python3
"""Prints a command of README.md, so that what is tested is what is written there.

The README marks the code block by a comment in front of it: <!-- command: NAME -->.
"""

import pathlib
import re
import sys


def command(text: str, name: str) -> str:
    """The contents of the code block marked with a name."""
    marker = re.escape(f"<!-- command: {name} -->")
    found = re.findall(marker + r"\s*\n```[a-z]*\n(.*?)\n```", text, flags=re.DOTALL)
    if len(found) != 1:
        sys.exit(f"error: README.md has {len(found)} commands marked {name}, one is needed")
    return found[0]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: readme_command.py NAME")
    readme = pathlib.Path(__file__).resolve().parent.parent / "README.md"
    print(command(readme.read_text(encoding="utf-8"), sys.argv[1]))


if __name__ == "__main__":
    main()
