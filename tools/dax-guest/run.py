#!/usr/bin/env python3
"""Tests on real DAX, in a machine that QEMU emulates: `tools/dax-guest/run.py --help`, and README.md beside it.

Ends with 0 if everything passed, 1 if something failed, and 77 if the machine cannot run here.
"""

import argparse
import fcntl
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

from machine import (
    ACCELERATORS,
    EMULATION_IN_TURNS,
    PMEM_DATA_OFFSET,
    Failure,
    Machine,
    Skip,
    build_plugin,
    choose_accelerator,
    copy_sparse,
    fetch_kernel,
    first_file_system,
    install_packages,
    make_image,
)
from power_cuts import cut_again_and_again

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TARGET = "x86_64-unknown-linux-gnu"
# Package, and the test binary of it that runs in the guest.
BINARIES = [("lightkv-pmem", "it"), ("lightkv", "kill")]

# What of the platform is persistent, as QEMU calls it, and what that makes of its memory.
GRANULARITIES = {"mem-ctrl": "cache-line", "cpu": "byte"}

# Engines, and what their kill test calls its store.
KILLED = {"lightkv": "a_pool", "hikv": "hash_tables"}

PMEM_BYTES = 384 << 20
DISK_BYTES = 1 << 30
# Longest that the guest may be silent: for that of a test, and of the 50 kills of a store, which take a quarter of an hour
# where the host is slow.
SILENCE_S = 3600
# The same for a boot.
BOOT_SILENCE_S = 900
SKIPPED = 77


def build(work: pathlib.Path) -> list[pathlib.Path]:
    """Builds the test binaries without shared libraries, which the guest has none of."""
    return [build_one(work, package, test) for package, test in BINARIES]


def build_one(work: pathlib.Path, package: str, test: str) -> pathlib.Path:
    flags = f"{os.environ.get('RUSTFLAGS', '')} -C target-feature=+crt-static".strip()
    command = ["cargo", "test", "--release", "--locked", "--no-run", "--target", TARGET]
    command += ["--package", package, "--test", test, "--message-format=json-render-diagnostics"]
    environment = {**os.environ, "RUSTFLAGS": flags}
    messages = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    found = [json.loads(line) for line in messages.splitlines()]
    (executable,) = [message["executable"] for message in found if message.get("executable")]
    # Without the hash in its name.
    program = work / test
    shutil.copyfile(executable, program)
    return program


def pool_tests(start, images: tuple[pathlib.Path, pathlib.Path]) -> None:
    """The pool's tests, on a platform that loses its caches with the power and on one that does not."""
    for persistence, granularity in GRANULARITIES.items():
        print(f"==> pool tests, persistence domain {persistence}", flush=True)
        # One test after the other: one of them fills the file system. Those of the emulated medium touch
        # no DAX, and take most of the time.
        command = (
            f"TMPDIR=/pmem LIGHTKV_PMEM_DAX=/pmem LIGHTKV_PMEM_GRANULARITY={granularity} "
            "./it --test-threads=1 dax:: files:: memory::"
        )
        with start(images, command, persistence=persistence) as machine:
            result = machine.follow(SILENCE_S)
        if result != 0:
            raise Failure(f"pool tests ended with {result}")


def kill_tests(
    start, images: tuple[pathlib.Path, pathlib.Path], engine: str, kills: int, seed: int, slowdown: int
) -> None:
    """Processes that are killed; the guest lives on."""
    print(f"==> {kills} kills, engine {engine}", flush=True)
    command = (
        f"TMPDIR=/disk LIGHTKV_KILL_POOL=/pmem LIGHTKV_KILL_CYCLES={kills} LIGHTKV_KILL_SEED={seed} "
        f"LIGHTKV_KILL_SLOWDOWN={slowdown} RUST_BACKTRACE=1 "
        f"./kill --nocapture --exact acknowledged_writes_survive_kills_with_{KILLED[engine]}_on_dax"
    )
    with start(images, command) as machine:
        result = machine.follow(SILENCE_S)
    if result != 0:
        raise Failure(f"the kill tests ended with {result}")


def plugin_test(start, recorded, images: tuple[pathlib.Path, pathlib.Path]) -> None:
    """Whether the plug-in keeps lines that were flushed and fenced, and no others."""
    print("==> test of the plug-in", flush=True)
    with recorded(images, "./lines_test write /pmem/lines") as machine:
        machine.wait_for("lines_test: written", BOOT_SILENCE_S)
        machine.cut_power()
        machine.check_plugin()
    with start(images, "./lines_test check /pmem/lines && rm /pmem/lines") as machine:
        result = machine.follow(BOOT_SILENCE_S)
    if result != 0:
        raise Failure(f"the test of the plug-in ended with {result}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tests on real DAX, in a machine that QEMU emulates.")
    parser.add_argument("--kills", type=int, default=24, help="processes killed (default %(default)s)")
    parser.add_argument("--cuts", type=int, default=10, help="power cuts (default %(default)s)")
    parser.add_argument(
        "--flushed-cuts", type=int, default=0,
        help="power cuts of which only what was flushed and fenced is left; always emulated by QEMU "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--engine", action="append", choices=list(KILLED),
        help="only this engine in kills and cuts; may be repeated (default: all, one after the other)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of writes and moments (default %(default)s)")
    parser.add_argument(
        "--accel",
        choices=["auto", *ACCELERATORS],
        default="auto",
        help="what executes the guest: the host's processor (kvm), QEMU itself (tcg, some ten times slower), or "
        "kvm where it can be used (default)",
    )
    parser.add_argument(
        "--persistence",
        choices=list(GRANULARITIES),
        default="mem-ctrl",
        help="what the platform of kills and cuts saves when power goes: only what has reached the memory "
        "controller (granularity CacheLine, the default), or the caches too (Byte)",
    )
    parser.add_argument(
        "--skip-pool-tests", action="store_true", help="only kills and cuts, for long runs of them"
    )
    options = parser.parse_args()
    if options.flushed_cuts > 0 and options.persistence != "mem-ctrl":
        parser.error("--flushed-cuts: on a platform that saves its caches nothing is flushed")
    return options


def work_folder() -> pathlib.Path:
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    work = target.absolute() / "dax-guest"
    work.mkdir(parents=True, exist_ok=True)
    return work


def run(options: argparse.Namespace) -> None:
    install_packages()
    accelerator = choose_accelerator(options.accel)
    print(f"==> accelerator {accelerator.name}", flush=True)
    work = work_folder()
    # Held until this process ends, however it does.
    lock = (work / "lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Failure(f"another run uses {work}") from None
    kernel = fetch_kernel(work)
    print("==> build", flush=True)
    programs = build(work)
    plugin = None
    if options.flushed_cuts > 0:
        plugin, lines_test = build_plugin(work)
        programs.append(lines_test)
    base = first_file_system(kernel, programs)
    start = functools.partial(
        Machine, work, kernel, base, accelerator=accelerator, persistence=options.persistence
    )

    print("==> first boot", flush=True)
    templates = (work / "pmem.img", work / "disk.img")
    make_image(templates[0], PMEM_BYTES, PMEM_DATA_OFFSET)
    make_image(templates[1], DISK_BYTES)
    with start(templates, "true") as machine:
        if machine.follow(BOOT_SILENCE_S) != 0:
            raise Failure("the machine does not start")

    images = (work / "run-pmem.img", work / "run-disk.img")
    for template, image in zip(templates, images):
        copy_sparse(template, image)
    if not options.skip_pool_tests:
        pool_tests(start, images)
    recorded = functools.partial(start, accelerator=EMULATION_IN_TURNS, plugin=plugin)
    if plugin:
        plugin_test(start, recorded, images)
    for engine in options.engine or KILLED:
        if options.kills > 0:
            kill_tests(start, images, engine, options.kills, options.seed, accelerator.slowdown)
        if options.cuts > 0:
            print(f"==> {options.cuts} power cuts, engine {engine}", flush=True)
            cut_again_and_again(
                start, templates, work, engine, options.cuts, options.seed, accelerator.slowdown
            )
        if options.flushed_cuts > 0:
            print(f"==> {options.flushed_cuts} power cuts that leave what was flushed, engine {engine}", flush=True)
            cut_again_and_again(
                recorded, templates, work, engine, options.flushed_cuts, options.seed, EMULATION_IN_TURNS.slowdown
            )
    for image in (*templates, *images):
        image.unlink()
    print("==> all passed", flush=True)


def main() -> None:
    options = arguments()
    # An ordinary end, so that the machine is ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        run(options)
    except Skip as skip:
        print(f"skipped: {skip}", file=sys.stderr)
        sys.exit(SKIPPED)
    except (Failure, subprocess.CalledProcessError) as failure:
        print(f"failed: {failure}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
