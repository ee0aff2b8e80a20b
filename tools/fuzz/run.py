#!/usr/bin/env python3
"""Fuzzes every decoder with libFuzzer and prints the executions of each as a line of JSON.

Needs Rust as rust-toolchain.toml says (stable) and a C++ compiler. docs/internals/fuzzing.md is the guide.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TRIPLE = "x86_64-unknown-linux-gnu"

# What the fuzzer needs to see which way an input took. The pass is part of LLVM and not of the compiler's own
# options, so it can be had on stable; cargo-fuzz and afl.rs do the same. Checks of arithmetic and
# debug assertions are on: an overflow that release builds wrap is a finding.
FLAGS = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cdebug-assertions=on",
    "-Coverflow-checks=on",
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executions", type=int, default=100_000_000, help="over all targets that are run")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--share", action="store_true", help="each target gets what it would get if all were run"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets side by side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=pathlib.Path, default=ROOT / "target/fuzz/corpus")
    parser.add_argument("--output", type=pathlib.Path, help="also write the JSON there")
    return parser.parse_args()


def build() -> pathlib.Path:
    """Builds the one binary of all targets, in a folder of its own: the flags reach all crates."""
    directory = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "fuzz"
    environment = dict(os.environ)
    environment["CARGO_TARGET_DIR"] = str(directory)
    environment["CARGO_ENCODED_RUSTFLAGS"] = "\x1f".join(FLAGS)
    # Thin linking would bring nothing: what is measured is coverage, not speed.
    environment["CARGO_PROFILE_RELEASE_LTO"] = "off"
    command = ["cargo", "build", "--release", "--locked", "-p", "lightkv-fuzz", "--bin", "lightkv-fuzz"]
    # With a target named, build scripts and macros are built without the flags.
    subprocess.run([*command, "--target", TRIPLE], cwd=ROOT, env=environment, check=True)
    return directory / TRIPLE / "release/lightkv-fuzz"


def listed(binary: pathlib.Path) -> list[dict]:
    """The targets with their weights and the longest input of each."""
    answer = subprocess.run(
        [binary], env={**os.environ, "LIGHTKV_FUZZ_LIST": "1"}, stdout=subprocess.PIPE, check=True
    )
    return [
        {"name": name, "weight": int(weight), "len_max": len_max}
        for name, weight, len_max in (line.split() for line in answer.stdout.decode().splitlines())
    ]


def fuzz(binary: pathlib.Path, target: dict, executions: int, options: argparse.Namespace) -> dict:
    """Runs one target and reads what it says at its end."""
    name = target["name"]
    corpus = options.corpus / name
    corpus.mkdir(parents=True, exist_ok=True)
    findings = options.corpus.parent / "findings"
    findings.mkdir(parents=True, exist_ok=True)
    command = [
        str(binary),
        f"-runs={executions}",
        f"-seed={options.seed}",
        f"-max_len={target['len_max']}",
        "-timeout=100",
        "-rss_limit_mb=1024",
        "-print_final_stats=1",
        f"-artifact_prefix={findings / name}-",
        str(corpus),
    ]
    begin = time.monotonic()
    environment = {**os.environ, "LIGHTKV_FUZZ_TARGET": name, "RUST_BACKTRACE": "1"}
    answer = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    seconds = time.monotonic() - begin
    text = answer.stderr.decode(errors="replace")
    executed = re.search(r"stat::number_of_executed_units: (\d+)", text)
    coverage = re.findall(r"cov: (\d+)", text)
    result = {
        "executions": int(executed[1]) if executed else 0,
        "seconds": round(seconds, 1),
        "edges": int(coverage[-1]) if coverage else 0,
        "violations": int(answer.returncode != 0),
    }
    if answer.returncode != 0:
        artifact = re.search(r"Test unit written to (\S+)", text)
        print(text[-6000:], file=sys.stderr)
        if artifact:
            result["input"] = artifact[1]
            print(
                f"again with: cargo run --release -p lightkv-fuzz -- replay {name} {artifact[1]}",
                file=sys.stderr,
            )
    return result


def main() -> None:
    options = arguments()
    binary = build()
    targets = listed(binary)
    weights = sum(target["weight"] for target in targets)
    if options.target:
        unknown = set(options.target) - {target["name"] for target in targets}
        if unknown:
            sys.exit(f"error: no such target: {', '.join(sorted(unknown))}")
        targets = [target for target in targets if target["name"] in options.target]
    environment = {**os.environ, "LIGHTKV_FUZZ_SEEDS": str(options.corpus)}
    subprocess.run([binary], env=environment, check=True)
    if not options.share:
        weights = sum(target["weight"] for target in targets)
    begin = time.monotonic()
    results = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = {}
        for target in targets:
            executions = -(-options.executions * target["weight"] // weights)
            runs[pool.submit(fuzz, binary, target, executions, options)] = target["name"]
        for run in concurrent.futures.as_completed(runs):
            results[runs[run]] = run.result()
            print(f"{runs[run]}: {json.dumps(run.result())}", file=sys.stderr)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=False
    )
    report = {
        "check": "fuzzing",
        "commit": commit.stdout.decode().strip(),
        "seed": options.seed,
        "seconds": round(time.monotonic() - begin, 1),
        "executions": sum(result["executions"] for result in results.values()),
        "violations": sum(result["violations"] for result in results.values()),
        "targets": {target["name"]: results[target["name"]] for target in targets},
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    for name, result in report["targets"].items():
        # One line each, as every check prints its counts.
        line = {
            "check": "fuzzing",
            "part": name,
            "seed": options.seed,
            "seconds": result["seconds"],
            "violations": result["violations"],
            "counts": {"executions": result["executions"], "edges": result["edges"]},
        }
        print(json.dumps(line), flush=True)
    if report["violations"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
