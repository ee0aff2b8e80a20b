#!/usr/bin/env python3
"""Checks what the workspace depends on: licences, sources, and versions that occur twice.

Only what a Linux x86-64 build needs is looked at. Cargo.lock must be complete (--locked).
"""

import collections
import json
import pathlib
import re
import subprocess
import sys

# Licences that a user of "MIT OR Apache-2.0" can take on without further duties than keeping notices.
LICENCES = {
    "MIT": "our own",
    "MIT-0": "MIT without the notice",
    "Apache-2.0": "our own",
    "BSD-2-Clause": "permissive, notice kept",
    "BSD-3-Clause": "permissive, notice kept",
    "0BSD": "permissive, no conditions",
    "ISC": "permissive, notice kept",
    "Zlib": "permissive, notice kept in source",
    "BSL-1.0": "permissive, no notice needed in binaries",
    "Unicode-3.0": "permissive, for tables made from Unicode data",
    "Unlicense": "public domain",
    "CC0-1.0": "public domain",
}

# Exceptions only add permissions.
EXCEPTIONS = {"LLVM-exception": "lifts the notice from binaries"}

# Crates that may occur in several incompatible versions, with the reason. Each costs build time.
DUPLICATES: dict[str, str] = {}

CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"


class Expression:
    """An SPDX licence expression; "/" is the old spelling of OR."""

    def __init__(self, text: str) -> None:
        self.tokens = re.findall(r"[()]|[^\s()/]+|/", text)

    def allowed(self) -> bool:
        """Whether some choice that the expression offers is on the list."""
        result = self._any()
        if self.tokens:
            raise ValueError(f"unexpected {self.tokens[0]!r}")
        return result

    def _any(self) -> bool:
        result = self._all()
        while self.tokens and self.tokens[0] in ("OR", "/"):
            self.tokens.pop(0)
            # Parsed first: the operand must be consumed even if the result is known.
            result = self._all() or result
        return result

    def _all(self) -> bool:
        result = self._one()
        while self.tokens and self.tokens[0] == "AND":
            self.tokens.pop(0)
            result = self._one() and result
        return result

    def _one(self) -> bool:
        if not self.tokens:
            raise ValueError("unexpected end")
        token = self.tokens.pop(0)
        if token == "(":
            result = self._any()
            if not self.tokens or self.tokens.pop(0) != ")":
                raise ValueError("missing )")
            return result
        result = token in LICENCES
        if self.tokens and self.tokens[0] == "WITH":
            self.tokens.pop(0)
            result = bool(self.tokens) and self.tokens.pop(0) in EXCEPTIONS and result
        return result


def licence_problem(package: dict) -> str | None:
    """What is wrong with a package's licence."""
    text = package["license"]
    if not text:
        return "names no licence"
    try:
        return None if Expression(text).allowed() else f"licence {text!r} is not on the list"
    except ValueError as error:
        return f"licence {text!r} cannot be read: {error}"


def source_problem(package: dict, root: pathlib.Path) -> str | None:
    """What is wrong with where a package comes from."""
    if package["source"] is None:
        manifest = pathlib.Path(package["manifest_path"]).resolve()
        return None if manifest.is_relative_to(root) else "lies outside of this workspace"
    if package["source"] != CRATES_IO:
        return f"comes from {package['source']}, not from crates.io"
    return None


def compatible_series(version: str) -> str:
    """The part of a version that incompatible releases differ in."""
    major, minor, patch = version.split("+")[0].split("-")[0].split(".")
    if major != "0":
        return major
    return f"0.{minor}" if minor != "0" else f"0.0.{patch}"


def duplicate_problems(packages: list[dict]) -> list[str]:
    """Crates in several incompatible versions, and list entries that are no longer needed."""
    series = collections.defaultdict(set)
    for package in packages:
        series[package["name"]].add(compatible_series(package["version"]))
    twice = {name: found for name, found in series.items() if len(found) > 1}
    problems = [
        f"{name}: incompatible versions {', '.join(sorted(found))}; unify them or give a reason"
        for name, found in sorted(twice.items())
        if name not in DUPLICATES
    ]
    problems += [
        f"{name}: listed as duplicate, but is none any more"
        for name in sorted(DUPLICATES)
        if name not in twice
    ]
    return problems


def main() -> None:
    root = pathlib.Path(__file__).resolve().parent.parent
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    answer = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=False)
    if answer.returncode != 0:
        sys.exit("error: cargo metadata failed; is Cargo.lock complete and committed?")
    packages = json.loads(answer.stdout)["packages"]

    problems = []
    for package in packages:
        for problem in (licence_problem(package), source_problem(package, root)):
            if problem:
                problems.append(f"{package['name']} {package['version']}: {problem}")
    problems += duplicate_problems(packages)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    print(f"{len(packages)} packages: licences, sources and versions are in order")


if __name__ == "__main__":
    main()
