#!/usr/bin/env python3
"""Does the suite notice bugs? Applies each patch beside this file to a copy of the tree and runs the checks.

    python3 crates/crash-test/seeded-bugs/run.py [--directory D] [NUMBER ...]

Prints for every bug which check caught it, and how long that took; fails if one was missed, does not apply or does not
build any more. Checks go from cheap to dear, but the one that caught a bug the last time (`caught.json`) comes first.
Without any patch the checks of the short form have to pass, or a catch would mean nothing. Writes `caught.json` and
docs/internals/seeded-bugs.md. The copy and its build stay in the directory: the next run builds only what changed.
"""

import argparse
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CAUGHT = HERE / "caught.json"
PAGE = ROOT / "docs/internals/seeded-bugs.md"


@dataclass
class Check:
    """One command, and whether `cargo test --workspace` runs the same."""

    name: str
    package: str
    target: list[str]
    filters: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    is_short: bool = True

    def build(self) -> list[str]:
        return ["cargo", "test", "--locked", "--quiet", "-p", self.package, *self.target, "--no-run"]

    def run(self) -> list[str]:
        return ["cargo", "test", "--locked", "-p", self.package, *self.target, "--", *self.filters]


def integration(name: str, *filters: str, **more) -> Check:
    return Check(name, "lightkv", ["--test", "it"], filters, **more)


def crashes(name: str, *filters: str, **more) -> Check:
    return Check(name, "lightkv-crash-test", ["--test", "it"], filters, **more)


# Of the crate that the patch changes.
UNIT_TESTS = {
    crate: Check(f"tests of {crate}", f"lightkv-{crate}", []) for crate in ("journal", "memory", "pmem", "table", "vfs")
}
UNIT_TESTS["lightkv"] = Check("tests of lightkv", "lightkv", ["--lib"])

# In the order of their cost.
CHECKS = [
    integration("opening and limits", "faults::opening", "faults::limits", "faults::process", "recovery", "regressions"),
    integration("failing calls of one store", "faults::io_errors", "faults::space"),
    integration("operations", "basics", "background", "compaction", "checkpoint", "delete_range", "partitions"),
    integration("operations of hikv", "hikv"),
    crashes("scripts of crashes", "scripts"),
    crashes("crashes of the journal", "crashes_of_a_journal", "beside_a_journal", "joins_are_survived_with_a_journal"),
    crashes("crashes of the pool", "pool"),
    integration("sequences", "model"),
    integration("corruption", "corruption"),
    integration("histories", "linearizability"),
    Check("kills and power losses", "lightkv", ["--test", "kill"]),
    Check("fuzzing", "lightkv-fuzz", ["--test", "it"]),
    # What a long form does more of.
    crashes("crashes, long", environment=(("LIGHTKV_CRASH_TEST_SECONDS", "120"),), is_short=False),
    integration("histories, long", "linearizability", environment=(("LIGHTKV_HISTORIES", "1500"),), is_short=False),
    integration("sequences, long", "model", environment=(("LIGHTKV_MODEL_SEQUENCES", "1500"),), is_short=False),
    Check(
        "kills and power losses, long", "lightkv", ["--test", "kill"],
        environment=(("LIGHTKV_KILL_CYCLES", "200"), ("LIGHTKV_POWER_LOSSES", "200")), is_short=False,
    ),
]
# A check that takes so many times as long as without a bug hangs.
HANG_FACTOR, HANG_LEAST_SECONDS = 6, 300
# Of those of the long form, which are not run without a bug: `tools/reliability/run.py --long` does that.
HANG_LONG_SECONDS = 3600


def copy_tree(target: pathlib.Path) -> None:
    """The files that git knows or would take; those that are the same keep their times, and so their builds."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")
    wanted = {name for name in names if name and (ROOT / name).is_file()}
    for name in wanted:
        source, place = ROOT / name, target / name
        if not place.exists() or place.read_bytes() != source.read_bytes():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
    for path in target.rglob("*"):
        if path.is_file() and str(path.relative_to(target)) not in wanted:
            path.unlink()


class Tree:
    """A copy with a build of its own."""

    def __init__(self, directory: pathlib.Path):
        self.place = directory / "tree"
        self.place.mkdir(parents=True, exist_ok=True)
        copy_tree(self.place)
        self.environment = {
            **os.environ,
            "CARGO_TARGET_DIR": str(directory / "build"),
            "CARGO_INCREMENTAL": "1",
            # Nobody debugs it, and linking is most of what a changed line costs.
            "CARGO_PROFILE_DEV_DEBUG": "0",
            "RUST_BACKTRACE": "0",
        }
        self.last_output = ""

    def patch(self, patch: pathlib.Path, *more: str) -> bool:
        command = ["patch", "--strip=1", "--silent", "--no-backup-if-mismatch", "--input", str(patch), *more]
        return subprocess.run(command, cwd=self.place).returncode == 0

    def build(self, check: Check) -> str:
        """What is wrong, if it does not build."""
        result = subprocess.run(
            check.build(), cwd=self.place, env=self.environment, capture_output=True, text=True
        )
        return result.stderr if result.returncode != 0 else ""

    def fails(self, check: Check, seconds_max: float) -> str:
        """The test that fails, or nothing."""
        environment = {**self.environment, **dict(check.environment)}
        process = subprocess.Popen(
            check.run(), cwd=self.place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds_max)
            self.last_output = output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "hangs"
        if process.returncode == 0:
            return ""
        failed = re.findall(r"^test (\S+) .*FAILED$", output, flags=re.MULTILINE)
        # Its cut is somewhere else now, which says nothing of right or wrong.
        if "Ok(Unfit(" in output:
            return ""
        # A test may also end the whole process, by a signal for example.
        return failed[0] if failed else "ends the process"


def checks_for(patch: pathlib.Path) -> list[Check]:
    crates = re.findall(r"^\+\+\+ b/crates/(\w[\w-]*)/", patch.read_text(), flags=re.MULTILINE)
    return [*(UNIT_TESTS[crate] for crate in dict.fromkeys(crates)), *CHECKS]


def catch(
    tree: Tree, patch: pathlib.Path, limits: dict[str, float], last: dict, last_only: bool
) -> dict | None:
    """The first check that fails, and the test of it."""
    checks = checks_for(patch)
    checks.sort(key=lambda check: check.name != last.get("check"))
    if last_only:
        checks = checks[:1]
    for check in checks:
        problem = tree.build(check)
        if problem:
            sys.exit(f"{patch.stem} does not build:\n{problem}")
        begin = time.monotonic()
        usual = limits.get(check.name, HANG_LONG_SECONDS / HANG_FACTOR)
        limit = max(usual * HANG_FACTOR, HANG_LEAST_SECONDS)
        test = tree.fails(check, limit)
        if test:
            return {
                "check": check.name, "test": test, "is_short": check.is_short,
                "seconds": round(time.monotonic() - begin, 1),
            }
    return None


def baseline(tree: Tree, limits_path: pathlib.Path) -> dict[str, float]:
    """Runs the checks of the short form without a bug; how long each takes, in seconds."""
    limits = {}
    for check in [*UNIT_TESTS.values(), *filter(lambda check: check.is_short, CHECKS)]:
        problem = tree.build(check)
        if problem:
            sys.exit(problem)
        begin = time.monotonic()
        test = tree.fails(check, 3600)
        if test:
            # A test that fails now and then may not do so again for a hundred runs.
            sys.exit(f"{tree.last_output}\n{check.name} fails without a bug: {test}")
        limits[check.name] = round(time.monotonic() - begin, 1)
        print(f"without a bug: {check.name}, {limits[check.name]} s", flush=True)
    limits_path.write_text(json.dumps(limits, indent=2) + "\n")
    return limits


def number(name: str) -> int:
    """Bugs are in the order of their numbers."""
    return int(name.split("-", 1)[0])


def load() -> dict[str, dict]:
    return json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}


def note(name: str, found: dict | None) -> None:
    """Writes down what caught a bug; several runs may do it side by side."""
    with (HERE / "run.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        caught = load()
        caught[name] = found or {"check": None, "test": None, "is_short": False, "seconds": 0}
        known = {patch.stem for patch in HERE.glob("*.patch")}
        caught = {name: caught[name] for name in sorted(caught, key=number) if name in known}
        CAUGHT.write_text(json.dumps(caught, indent=2) + "\n")
        write_page(caught)


def write_page(caught: dict[str, dict]) -> None:
    found = [one for one in caught.values() if one["check"]]
    short = [one for one in found if one["is_short"]]
    waiting = len(list(HERE.glob("*.patch"))) - len(caught)
    lines = [
        "# Seeded bugs: what catches them", "",
        "Generated by `crates/crash-test/seeded-bugs/run.py`; not written by hand. Each bug is a patch beside it, which is",
        "applied to a copy of the tree. The check named is one that fails then; others may, too. Those marked *long* are of",
        "the long form, all others are part of `cargo test --workspace`.", "",
        f"Caught: {len(found)} of {len(caught)}, {len(short)} of them by the short form. Not run yet: {waiting}.", "",
        "| bug | what is wrong | caught by | test | seconds |", "|---|---|---|---|---|",
    ]
    for name, one in caught.items():
        what = (HERE / f"{name}.patch").read_text().split("\n", 1)[0]
        check = "**missed**" if not one["check"] else one["check"] + ("" if one["is_short"] else " (*long*)")
        test = f"`{one['test']}`" if one["test"] else ""
        lines.append(f"| {name} | {what} | {check} | {test} | {one['seconds']:.0f} |")
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NUMBER", nargs="*", help="only patches of these numbers")
    parser.add_argument("--directory", type=pathlib.Path, default=ROOT / "target/seeded-bugs")
    parser.add_argument("--no-baseline", action="store_true", help="the checks are known to pass without a bug")
    parser.add_argument(
        "--last-only", action="store_true", help="only the check that caught a bug the last time; a miss is not recorded"
    )
    arguments = parser.parse_args()
    patches = [
        patch for patch in sorted(HERE.glob("*.patch"), key=lambda patch: number(patch.name))
        if not arguments.names or patch.name.startswith(tuple(f"{name}-" for name in arguments.names))
    ]
    directory = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    tree = Tree(directory)
    limits_path = directory / "seconds.json"
    if not arguments.no_baseline:
        limits = baseline(tree, limits_path)
    else:
        limits = json.loads(limits_path.read_text()) if limits_path.exists() else {}
    missed = []
    for patch in patches:
        begin = time.monotonic()
        if not tree.patch(patch, "--dry-run"):
            sys.exit(f"{patch.name} does not apply any more")
        tree.patch(patch)
        try:
            found = catch(tree, patch, limits, load().get(patch.stem, {}), arguments.last_only)
        finally:
            tree.patch(patch, "--reverse")
        if found or not arguments.last_only:
            note(patch.stem, found)
        verdict = f"caught by {found['check']}, {found['test']}" if found else "MISSED"
        print(f"{patch.stem}: {verdict}, {time.monotonic() - begin:.0f} s", flush=True)
        if not found:
            missed.append(patch.stem)
    print(f"{len(patches) - len(missed)} of {len(patches)} caught")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
