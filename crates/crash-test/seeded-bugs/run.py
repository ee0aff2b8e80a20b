#!/usr/bin/env python3
"""Does the suite notice bugs? Applies each patch beside this file to a copy of the tree and runs the short form.

    python3 crates/crash-test/seeded-bugs/run.py [--seconds 60] [NAME ...]

Prints for every bug which check caught it, and how long that took; fails if one was missed. A patch that does not
apply any more is a failure too: it is to be renewed. Builds go to a target directory of the copy, which is removed.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# One after the other, so that it is known which check caught the bug.
CHECKS = {
    **{
        f"crashes, {name}": ["--only", "crashes", "--configuration", name]
        for name in ("pool-split", "pool-one-leaf", "journal-power", "journal-kill")
    },
    **{
        f"failing calls, {name}": ["--only", "errors", "--configuration", name]
        for name in ("pool-split", "journal-power")
    },
}


def copy_tree(target: pathlib.Path) -> None:
    """The files that git knows or would take."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        source = ROOT / name
        if source.is_file():
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)


def catch(tree: pathlib.Path, seconds: int) -> str:
    """The check that fails, or nothing."""
    command = ["cargo", "run", "--release", "--quiet", "-p", "lightkv-crash-test", "--"]
    for name, arguments in CHECKS.items():
        # Only the verdict counts, so failures are not made smaller for long; a hang is a catch as well.
        try:
            result = subprocess.run(
                [*command, *arguments, "--seconds", str(seconds), "--minimise-seconds", "0"],
                cwd=tree, capture_output=True, text=True, timeout=seconds * 4 + 1200,
            )
        except subprocess.TimeoutExpired:
            return f"{name} (hangs)"
        if result.returncode == 1:
            return name
        if result.returncode != 0:
            sys.exit(f"the run failed:\n{result.stdout}{result.stderr}")
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only patches whose names contain one of these")
    parser.add_argument("--seconds", type=int, default=20, help="for each check")
    arguments = parser.parse_args()
    patches = [
        patch for patch in sorted(HERE.glob("*.patch"))
        if not arguments.names or any(name in patch.name for name in arguments.names)
    ]
    missed = []
    with tempfile.TemporaryDirectory() as directory:
        tree = pathlib.Path(directory)
        copy_tree(tree)
        for patch in patches:
            start = time.monotonic()
            apply = ["patch", "--strip=1", "--silent", "--input", str(patch)]
            subprocess.run(apply, cwd=tree, check=True)
            caught = catch(tree, arguments.seconds)
            subprocess.run([*apply, "--reverse"], cwd=tree, check=True)
            verdict = f"caught by {caught}" if caught else "MISSED"
            print(f"{patch.stem}: {verdict}, {time.monotonic() - start:.0f} s", flush=True)
            if not caught:
                missed.append(patch.stem)
    print(f"{len(patches) - len(missed)} of {len(patches)} caught")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
