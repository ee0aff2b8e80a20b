"""Cuts the power of a machine whose store is being written to, again and again.

The guest runs `power_cut_child` of crates/lightkv/tests/kill. It says through a port what was acknowledged,
and after the next start which operation of each thread is the last that the store holds. No thread
may hold fewer than were acknowledged, nor fewer than it was once found to hold; that the content is exactly the one
after that operation is for the guest to check.
"""

import collections
import pathlib
import random
import re
import time
from collections.abc import Callable

from machine import Failure, Machine, Patience, copy_sparse

# Cuts after which a new store is begun: cut first opens matter too.
CUTS_OF_A_STORE = 25
# A guest that needs longer for one step hangs.
PATIENCE_S = 900
THREADS = 4

PORT = "/dev/vport0p1"
ACKNOWLEDGED = re.compile(r"acknowledged (\d+) (\d+)")
FOUND = re.compile(r"found (\d+) (\d+)")


class Port:
    """What the guest has said so far, in whole lines."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.begun = b""
        self.read_bytes = 0

    def new_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.read_bytes)
            text = file.read()
        self.read_bytes += len(text)
        *lines, self.begun = (self.begun + text).split(b"\n")
        return [line.decode() for line in lines]


class Store:
    """One store and what is known of it outside of the machine."""

    def __init__(self, setup: str, seed: int, totals: collections.Counter) -> None:
        self.setup = setup
        self.seed = seed
        self.known = [0] * THREADS
        self.totals = totals
        self.medium = ""

    def command(self, start_seed: int, close_after_ms: int | None) -> str:
        known = ",".join(map(str, self.known))
        close = "-" if close_after_ms is None else close_after_ms
        # The engine makes both directories, so the loss of their names is tested too.
        task = f"{self.setup} {self.seed} {start_seed} {close} {known} /disk /pmem/pool {PORT}"
        return f"LIGHTKV_POWER_CUT_TASK='{task}' RUST_BACKTRACE=1 ./kill --exact power_cut_child --nocapture"

    def hear(self, line: str) -> None:
        """Takes note of a line of the guest."""
        if acknowledged := ACKNOWLEDGED.fullmatch(line):
            thread, number = map(int, acknowledged.groups())
            if number != self.known[thread] + 1:
                raise Failure(f"thread {thread} acknowledged {number} after {self.known[thread]}")
            self.known[thread] = number
            self.totals["acknowledged"] += 1
        elif found := FOUND.fullmatch(line):
            thread, number = map(int, found.groups())
            if number < self.known[thread]:
                raise Failure(f"thread {thread}: {self.known[thread]} was known, {number} was found")
            self.totals["found beyond"] += number - self.known[thread]
            self.known[thread] = number
        elif line.startswith("opened "):
            self.medium = line.removeprefix("opened ")


def run_until(machine: Machine, port: Port, store: Store, wanted: str, delay_s: float) -> str:
    """Lets the machine run for a time after the wanted line; the last step that it reached.

    An empty wanted line never comes.
    """
    step = "booting"
    cut_at = None
    patience = Patience(PATIENCE_S)
    while True:
        for line in port.new_lines():
            store.hear(line)
            word = line.split()[0]
            if word in ("opening", "opened", "verified", "closed"):
                step = word
                patience = Patience(PATIENCE_S)
            if word == wanted:
                cut_at = time.monotonic() + delay_s
        if cut_at is not None and time.monotonic() >= cut_at:
            machine.cut_power()
        elif machine.is_running():
            if patience.is_over():
                raise Failure(f"no progress for {PATIENCE_S} s while {step}")
            continue
        # What was on its way when the machine stopped.
        for line in port.new_lines():
            store.hear(line)
            if line in ("verified", "closed"):
                step = line
        return step


def choose_moment(chance: random.Random, slowdown: int) -> tuple[str, float, int | None]:
    """The line to wait for, the seconds to let pass then, and the time to close after instead of a cut."""
    kind = chance.randrange(100)
    if kind < 20:
        return "opening", chance.uniform(0, 0.05) * slowdown, None
    if kind < 28:
        return "opened", chance.uniform(0, 0.05) * slowdown, None
    if kind < 36:
        return "", 0, chance.randrange(150) * slowdown
    return "verified", chance.uniform(0.001, 0.25) * slowdown, None


def cut_again_and_again(
    start: Callable[[tuple[pathlib.Path, pathlib.Path], str], Machine],
    templates: tuple[pathlib.Path, pathlib.Path],
    work: pathlib.Path,
    engine: str,
    cuts: int,
    seed: int,
    slowdown: int,
) -> None:
    """Runs so many starts of the machine, and a last one of each store that checks it and closes it."""
    totals: collections.Counter = collections.Counter()
    begin = time.monotonic()
    images = (work / "cuts-pmem.img", work / "cuts-disk.img")
    number = 0
    medium = ""
    while totals["starts"] < cuts:
        chance = random.Random(f"{seed} {number}")
        # Small parts meet more splits, flushes and compactions; every fourth store has the defaults.
        size = "default" if number % 4 == 3 else "small"
        # As crates/lightkv/tests/kill/setup.rs names it.
        kind = "" if engine == "lightkv" else f"{engine}/"
        store = Store(f"{kind}pool-on-dax/{size}", chance.getrandbits(63), totals)
        for template, image in zip(templates, images):
            # A plain copy would fill the holes.
            image.unlink(missing_ok=True)
            copy_sparse(template, image)
        count = min(CUTS_OF_A_STORE, cuts - totals["starts"])
        for cut in range(count + 1):
            wanted, delay_s, close_after_ms = ("", 0, 0) if cut == count else choose_moment(chance, slowdown)
            with start(images, store.command(chance.getrandbits(63), close_after_ms)) as machine:
                try:
                    step = run_until(machine, Port(machine.port), store, wanted, delay_s)
                    if not wanted and (step != "closed" or machine.result() != 0):
                        raise Failure(f"ended while {step}, not by closing")
                    if any("panicked at" in line for line in machine.lines):
                        raise Failure(f"panicked while {step}")
                    if wanted and not machine.was_cut:
                        raise Failure(f"ended by itself while {step}")
                    machine.check_plugin()
                except Failure as failure:
                    raise Failure(
                        f"{store.setup}, seed {seed}, store {number}, start {cut}: {failure}\n"
                        f"{console_of(machine)}\nimages kept: {images[0]}, {images[1]}"
                    ) from failure
            if cut < count:
                totals["starts"] += 1
            totals[f"cut while {step}" if wanted else "closed"] += 1
        medium = store.medium
        number += 1
        report(engine, totals, number, medium, begin)
    for image in images:
        image.unlink()


def console_of(machine: Machine) -> str:
    """What is worth reading: from a panic on, or the end."""
    lines = machine.lines
    panics = [number for number, line in enumerate(lines) if "panicked at" in line]
    shown = lines[panics[0] :][:80] if panics else lines[-40:]
    return "\n".join(f"    {line}" for line in shown)


def report(engine: str, totals: collections.Counter, stores: int, medium: str, begin: float) -> None:
    moments = ", ".join(f"{count} {name}" for name, count in sorted(totals.items()) if name.startswith("cut"))
    print(
        f"power cuts of {engine} on {medium}: {stores} stores, {totals['starts']} starts ({moments}), "
        f"{totals['closed']} closed; {totals['acknowledged']} operations acknowledged, all found, "
        f"{totals['found beyond']} more; {time.monotonic() - begin:.0f} s",
        flush=True,
    )
