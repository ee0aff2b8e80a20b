#!/usr/bin/env python3
"""Runs every check of the store's reliability, and gathers what they counted.

    python3 tools/reliability/run.py --short                # what every change passes; minutes
    python3 tools/reliability/run.py --long                 # hours; writes RELIABILITY.json and docs/reliability.md
    python3 tools/reliability/run.py --long --only kills    # one check of it

Each part of a check prints its counts itself, as a line of JSON. A part that has finished is not run again, so a
long form that was interrupted goes on where it was. docs/internals/crash-testing.md is the guide.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Different images of each pool. One of HiKV, which has no files to open, costs a third.
POOLS = {
    "pool-split": 500_000, "pool-one-leaf": 500_000, "pool-byte": 500_000,
    "hikv": 1_800_000, "hikv-byte": 1_800_000, "hikv-log": 200_000, "hikv-ranges": 200_000,
}
JOURNALS = ("journal-power", "journal-kill")
# Stores that are opened and dropped thousands of times a second take memory from the C library, which would give each piece
# back to the system at once: a third of the time.
MEMORY_STAYS = {
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
# Configurations in which calls fail, as in the explorer.
FAILING = ("pool-split", "journal-power", "hikv")


@dataclass
class Part:
    """One command. It prints one line of JSON, or some."""

    check: str
    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    # Whether it is at its best on one processor. What threads do to each other, and what a kill or a lost power meets,
    # wants all of them.
    is_pinned: bool = False
    # Prints no counts of its own: its tests are counted.
    counts_tests: bool = False
    # Miri, and the address sanitizer.
    needs_nightly: bool = False

    def text(self) -> str:
        """The command as a shell takes it."""
        settings = [f"{name}={quoted(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.command)])


def quoted(value: str) -> str:
    """A value as a shell in the tree takes it, wherever that tree is."""
    if value.startswith(f"{ROOT}/"):
        return f'"$PWD{value.removeprefix(str(ROOT))}"'
    return shlex.quote(value)


def cargo_test(package: str, target: str, names: list[str], release: bool) -> list[str]:
    profile = ["--release"] if release else []
    return [
        "cargo", "test", *profile, "--locked", "-p", package, "--test", target, "--",
        "--nocapture", "--exact", *names,
    ]


def explorer(*arguments: str) -> list[str]:
    return ["cargo", "run", "--release", "--locked", "-q", "-p", "lightkv-crash-test", "--", *arguments]


def has_nightly() -> bool:
    """Whether there is a compiler with Miri and the address sanitizer; installed where rustup can reach it."""
    listed = ["rustup", "component", "list", "--toolchain", "nightly", "--installed"]
    try:
        present = subprocess.run(listed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
        # Asked to install what is there, rustup would fetch the nightly of today.
        if "rust-src" in present and "miri" in present:
            return True
    except (OSError, subprocess.CalledProcessError):
        pass
    install = ["rustup", "toolchain", "install", "nightly", "--profile", "minimal"]
    try:
        subprocess.run(
            [*install, "--component", "miri", "--component", "rust-src"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        print(f"skipped: Miri and the address sanitizer need a nightly compiler: {reason}", file=sys.stderr)
        return False
    return True


def models() -> list[Part]:
    """What shows more of an execution than running it does: every order of steps, undefined behaviour."""
    target = "x86_64-unknown-linux-gnu"
    own_build = lambda name: {"CARGO_TARGET_DIR": str(ROOT / "target" / name)}
    # As in CI, but to the end.
    parts = [Part(
        "models", "loom", ["cargo", "test", "--release", "--locked", "-p", "lightkv", "--lib", "loom_tests"],
        {"RUSTC_WORKSPACE_WRAPPER": str(ROOT / "ci/with_loom")}, counts_tests=True,
    )]
    parts.append(Part(
        "models", "Miri",
        ["cargo", "+nightly", "miri", "test", "--locked", "-p", "lightkv-pmem", "--lib", "--", "--skip", "waste_time"],
        # Pools of the tests are in temporary files, and the clock is read.
        {"MIRIFLAGS": "-Zmiri-disable-isolation", **own_build("miri")}, counts_tests=True, needs_nightly=True,
    ))
    # Not that of threads: it knows nothing of fences, of which the epochs and the version locks consist. The standard library
    # is the one that comes with the compiler: what of it is generic is built with the sanitizer, and all of it allocates there.
    parts.append(Part(
        "models", "address sanitizer",
        [
            "cargo", "+nightly", "test", "--locked", "--target", target, "--lib",
            "-p", "lightkv-pmem", "-p", "lightkv",
        ],
        {"RUSTFLAGS": "-Zsanitizer=address", **own_build("address-sanitizer")}, counts_tests=True, needs_nightly=True,
    ))
    return parts


def long_form(seed: int, fuzz_targets: list[str]) -> list[Part]:
    """Cheap ones first."""
    parts = []
    test = lambda target, *names: cargo_test("lightkv", target, list(names), True)
    for medium in ("a_journal", "a_pool_in_memory", "a_pool_in_a_file"):
        parts.append(Part(
            "kills", medium.removeprefix("a_").replace("_", "-"),
            test("kill", f"acknowledged_writes_survive_kills_with_{medium}"),
            {"LIGHTKV_KILL_CYCLES": "1000", "LIGHTKV_KILL_SEED": str(seed)},
        ))
    # Each process that comes back also compares the bytes in use with those that are reached.
    for medium in ("memory", "a_file"):
        parts.append(Part(
            "kills", "hikv-pool-in-" + medium.removeprefix("a_"),
            test("kill", f"acknowledged_writes_survive_kills_with_hash_tables_in_{medium}"),
            {"LIGHTKV_KILL_CYCLES": "500", "LIGHTKV_KILL_SEED": str(seed)},
        ))
    # In halves, to have them side by side: they wait for mounts, and hardly need a processor.
    for system in ("ext4", "xfs"):
        for half in (0, 1):
            parts.append(Part(
                "power losses", f"{system} {half}", test("kill", f"synced_writes_survive_power_losses_on_{system}"),
                {"LIGHTKV_POWER_LOSSES": "500", "LIGHTKV_KILL_SEED": str(seed + half)},
            ))
    for name, medium in (("journal", "a_journal"), ("pool", "a_pool"), ("hikv", "hash_tables")):
        parts.append(Part(
            "histories", name, test("it", f"linearizability::histories_with_{medium}_have_an_order"),
            {"LIGHTKV_HISTORIES": "5000", "LIGHTKV_HISTORIES_SEED": str(seed)},
        ))
    for name in FAILING:
        parts.append(Part("failing calls", name, explorer(
            "--only", "errors", "--configuration", name, "--seed", str(seed), "--states", "1", "--error-lives", "8",
        ), is_pinned=True))
    for engine, name in (("lightkv", "a_pool"), ("hikv", "a_pool_of_hikv")):
        parts.append(Part(
            "failing calls", f"pool of {engine}", test("it", f"faults::pool_calls::failing_calls_of_{name}_lose_nothing"),
            {"LIGHTKV_POOL_FAULTS": "all"}, is_pinned=True,
        ))
    # In quarters, to have them side by side: they wait for syncs most of the time.
    for quarter in range(4):
        parts.append(Part(
            "sequences", f"random option sets {quarter}", test("it", "model::random_sequences_match_an_ordered_map"),
            {"LIGHTKV_MODEL_SEQUENCES": "2500", "LIGHTKV_MODEL_SEED": str(seed + 2500 * quarter)},
        ))
    parts.append(Part(
        "sequences", "every option set", test("it", "model::option_sets_do_not_change_what_is_seen"),
        {"LIGHTKV_MODEL_SEQUENCES": "4500", "LIGHTKV_MODEL_SEED": str(seed)},
    ))
    # Threads that check what must always hold, and the same while splits, joins, flushes and merges take their time.
    threads = [
        "model::concurrent::partitions_follow_a_moving_load",
        "model::concurrent::concurrent_batches_are_seen_whole_with_a_journal",
        "model::concurrent::concurrent_batches_are_seen_whole_with_a_pool",
        "model::concurrent::concurrent_batches_are_seen_whole_with_hash_tables",
        "model::concurrent::concurrent_range_deletions_are_seen_whole",
    ]
    for name, tests in (("threads", threads), ("threads with pauses", ["model::pauses::steps_of_structural_changes_may_take_long"])):
        parts.append(Part(
            "sequences", name, test("it", *tests),
            {"LIGHTKV_MODEL_STRESS_SECONDS": "60", "LIGHTKV_MODEL_SEED": str(seed)}, counts_tests=True,
        ))
    damaged = (
        "closed_store", "killed_store", "closed_store_with_a_pool", "killed_store_with_a_pool",
        "closed_store_of_hikv", "killed_store_of_hikv", "killed_store_of_hikv_with_a_log", "checkpoint_of_hikv",
    )
    for store in damaged:
        parts.append(Part(
            "corruption", store.replace("_store", "").replace("_a_", "_").replace("_", " "),
            test("it", f"faults::corruption::a_damaged_{store}_errs_or_is_right"),
            {"LIGHTKV_CORRUPTION": "150000"}, is_pinned=True,
        ))
    for name in JOURNALS:
        parts.append(Part("crashes", name, explorer(
            "--only", "crashes", "--configuration", name, "--seed", str(seed), "--states", "20000", "--threads", "1",
        ), is_pinned=True))
    for name, images in POOLS.items():
        # A second life for one state in 100, and fewer ways of losing files at a moment: what most is wanted of is
        # losses of the pool.
        parts.append(Part("crashes", name, explorer(
            "--only", "crashes", "--configuration", name, "--seed", str(seed), "--pool-images", str(images),
            "--second-crash-every", "100", "--files-outcomes", "16", "--threads", "1",
        ), is_pinned=True))
    parts.extend(models())
    parts.append(fuzzing(seed, fuzz_targets))
    return parts


def fuzzing(seed: int, targets: list[str]) -> Part:
    """Every target, or some with the share that they have of all."""
    only = [word for target in targets for word in ("--target", target)]
    share = ["--share"] if targets else []
    return Part("fuzzing", " ".join(targets) or "all targets", [
        "python3", "tools/fuzz/run.py", *only, *share,
        "--executions", "100000000", "--seed", str(seed), "--jobs", "1",
    ], is_pinned=True)


def short_form() -> list[Part]:
    """The same tests as they are in `cargo test --workspace`, with its build."""
    filters = {
        "kills and power losses": ("lightkv", "kill", []),
        "failing calls, corruption, histories, sequences": (
            "lightkv", "it", ["faults", "linearizability", "model", "regressions", "recovery"]
        ),
        "crashes": ("lightkv-crash-test", "it", []),
        "fuzzing": ("lightkv-fuzz", "it", []),
    }
    return [
        Part(check, "short", [
            "cargo", "test", "--locked", "-p", package, "--test", target, "--", "--nocapture", *names,
        ], counts_tests=check in ("crashes", "fuzzing"))
        for check, (package, target, names) in filters.items()
    ]


def commit() -> str:
    """The commit of the tree, with a plus if it was changed."""
    git = lambda *arguments: subprocess.run(
        ["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    # What the checks themselves generate does not count.
    generated = (":!RELIABILITY.json", ":!docs/reliability.md")
    changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", *generated)
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changes else "")


def engine_commit(version: str) -> str:
    """The last commit up to one that changed what the checks test, and not the checks."""
    sources = [f"crates/{name}/src" for name in ("checksum", "journal", "lightkv", "pmem", "table", "vfs")]
    answer = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--abbrev=12", version.rstrip("+"), "--", *sources],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
    )
    return answer.stdout.strip() or "unknown"


def counted(line: str) -> dict | None:
    """What a line of output counts, if it is such a line."""
    start = line.find('{"check"')
    if start < 0:
        return None
    try:
        return json.loads(line[start:])
    except ValueError:
        return None


def run(part: Part, log: pathlib.Path, processor: int | None = None) -> list[dict]:
    """Runs a part, on one processor if it has one; what it counted, with where and how."""
    version = commit()
    begin = time.monotonic()
    processors = set(os.sched_getaffinity(0)) if processor is None else {processor}
    environment = {**os.environ, **MEMORY_STAYS, **part.environment}
    counts, tail, tests = [], [], 0
    with log.open("w") as output:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", preexec_fn=lambda: os.sched_setaffinity(0, processors),
        )
        for line in process.stdout:
            output.write(line)
            output.flush()
            tail = [*tail[-40:], line]
            tests += line.startswith("test ") and line.endswith("... ok\n")
            found = counted(line)
            if found is not None:
                counts.append(found)
        # What it used with all that it waited for, and nothing of what runs beside it.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status = os.waitstatus_to_exitcode(status)
    common = {
        "commit": version,
        "command": part.text(),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "processors": len(processors),
    }
    if part.counts_tests and status == 0 and tests > 0:
        counts.append({
            "check": part.check, "part": part.name, "seed": 0, "violations": 0, "counts": {"tests": tests},
            "seconds": round(time.monotonic() - begin, 1),
        })
    if status != 0 and not any(found["violations"] for found in counts):
        # A test that fails ends before it has counted.
        counts.append({
            "check": part.check, "part": part.name, "seed": 0, "violations": 1, "counts": {},
            "seconds": round(time.monotonic() - begin, 1),
        })
    if status != 0:
        print("".join(tail), file=sys.stderr)
        again = [line.strip() for line in tail if "again with:" in line]
        print(f"FAILED: {part.check}, {part.name}; all of its output is in {log}", file=sys.stderr)
        print(again[-1] if again else f"again with: {part.text()}", file=sys.stderr)
    return [{**found, **common} for found in counts]


def gather(directory: pathlib.Path, parts: list[Part], output: pathlib.Path, page: pathlib.Path) -> None:
    """Writes what was counted so far, and the page of it. Parts that were not run here stay as they were counted before."""
    found = []
    for part in parts:
        path = directory / f"{file_name(part)}.json"
        if path.exists():
            found.extend(json.loads(path.read_text()))
    for counts in found:
        counts["engine_commit"] = engine_commit(counts["commit"])
    own = {(counts["check"], counts["part"]) for counts in found}
    if output.exists():
        before = json.loads(output.read_text())["parts"]
        found = [counts for counts in before if (counts["check"], counts["part"]) not in own] + found
    output.write_text(json.dumps({"parts": found}, indent=2) + "\n")
    subprocess.run(
        explorer("report", str(output.resolve()), "--output", str(page.resolve())), cwd=ROOT, check=True
    )


def is_finished(result: pathlib.Path) -> bool:
    """Whether a part need not run: what failed is run again, once it is mended."""
    if not result.exists():
        return False
    counts = json.loads(result.read_text())
    return bool(counts) and not any(found["violations"] for found in counts)


def file_name(part: Part) -> str:
    return f"{part.check} {part.name}".replace(" ", "-")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--short", action="store_true", help="what every change passes")
    form.add_argument("--long", action="store_true", help="hours; needs root, mkfs.ext4, mkfs.xfs and loop devices")
    form.add_argument("--gather", action="store_true", help="only write the counts of what has finished, and the page")
    parser.add_argument("--only", action="append", help="a check, or CHECK/PART; may be repeated")
    parser.add_argument(
        "--fuzz-target", action="append", default=[],
        help="only this target, with its share of the executions; may be repeated",
    )
    parser.add_argument("--again", action="store_true", help="also what has finished")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--jobs", type=int, default=1, help="parts side by side; those that are at their best on one processor have one each"
    )
    parser.add_argument(
        "--seconds", type=int, help="end each exploration of crashes after so long, whatever it has reached"
    )
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "target/reliability")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "RELIABILITY.json")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/reliability.md")
    return parser.parse_args()


def is_done(part: Part, options: argparse.Namespace) -> bool:
    return options.long and is_finished(options.results / f"{file_name(part)}.json")


def run_and_keep(part: Part, options: argparse.Namespace, processors: queue.SimpleQueue) -> bool:
    """Runs a part and writes down what it counted; whether nothing was wrong."""
    result = options.results / f"{file_name(part)}.json"
    print(f"{part.check}, {part.name}: {part.text()}", flush=True)
    processor = processors.get() if part.is_pinned and options.jobs > 1 else None
    try:
        counts = run(part, options.results / f"{file_name(part)}.log", processor)
    finally:
        if processor is not None:
            processors.put(processor)
    for found in counts:
        print(json.dumps(found), flush=True)
    if options.long:
        temporary = result.with_suffix(".new")
        temporary.write_text(json.dumps(counts, indent=2) + "\n")
        temporary.rename(result)
    return bool(counts) and not any(found["violations"] for found in counts)


def main() -> None:
    options = arguments()
    options.results.mkdir(parents=True, exist_ok=True)
    parts = short_form() if options.short else long_form(options.seed, options.fuzz_target)
    for part in parts if options.seconds else []:
        if part.check == "crashes":
            part.command += ["--seconds", str(options.seconds)]
    wanted = [
        part for part in parts
        if not options.only or {part.check, f"{part.check}/{part.name}"} & set(options.only)
    ]
    if not wanted:
        known = sorted({part.check for part in parts})
        sys.exit(f"error: no such check; there are {', '.join(known)}")
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        processors = queue.SimpleQueue()
        for job, processor in zip(range(options.jobs), sorted(os.sched_getaffinity(0))):
            processors.put(processor)
        todo = [part for part in ([] if options.gather else wanted) if options.again or not is_done(part, options)]
        if any(part.needs_nightly for part in todo) and not has_nightly():
            todo = [part for part in todo if not part.needs_nightly]
        for is_sound in pool.map(lambda part: run_and_keep(part, options, processors), todo):
            failed += not is_sound
    if not options.short:
        gather(options.results, parts, options.output, options.page)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
