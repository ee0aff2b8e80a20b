#!/usr/bin/env python3
"""Mechanical rules of the house that no other tool checks. Prints every breach and ends with 1."""

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A file is read in one sitting.
LINES_MAX = 1_200

# Texts under these rules; data and licences are as their authors wrote them.
SUFFIXES = {".rs", ".md", ".py", ".sh", ".toml"}
EXTENSIONLESS = {".ci/run", ".gitignore"}

# Work that is left for later belongs into an issue. Spelt so that this file does not break the rule.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b|\b(to" r"do|unimple" r"mented|d" r"bg)!")

# Where unsafe code may stand, and for what. Everything else is safe Rust.
RECORDS = "reads records of the buffer, whose space an epoch guard keeps"
ITEMS = "reads items of the pool, whose space an epoch guard or a lock keeps"
UNSAFE = {
    "crates/bench-peers/src/stores/leveldb/bindings.rs": "declares and calls LevelDB's C interface",
    "crates/bench-peers/src/stores/lmdb.rs": "opens LMDB's map",
    "crates/bench/src/clock.rs": "reads the time stamp counter",
    "crates/checksum/src/lib.rs": "calls the processor's checksum instructions",
    "crates/fuzz/src/allocations.rs": "counts what the allocator is asked for",
    "crates/journal/src/mapped.rs": "stores into mapped journal files",
    "crates/lightkv/src/engines/hikv/brief_lock.rs": "says that a lock excludes others",
    "crates/lightkv/src/engines/hikv/hash_index.rs": "publishes and frees tables by epoch",
    "crates/lightkv/src/engines/hikv/items.rs": "follows offsets to items of the pool",
    "crates/lightkv/src/engines/hikv/ordered_index/memory.rs": "allocates and follows nodes of the tree",
    "crates/lightkv/src/engines/hikv/ordered_index/sync.rs": "stands for the epochs in models",
    "crates/lightkv/src/engines/hikv/read.rs": ITEMS,
    "crates/lightkv/src/engines/hikv/recovery.rs": ITEMS,
    "crates/lightkv/src/engines/hikv/sync.rs": "hands tables over to the epochs, and stands for them in models",
    "crates/lightkv/src/engines/hikv/verify.rs": ITEMS,
    "crates/lightkv/src/engines/hikv/write.rs": ITEMS,
    "crates/lightkv/src/engines/lightkv/buffer.rs": "turns offsets into records and back",
    "crates/lightkv/src/engines/lightkv/flush.rs": RECORDS,
    "crates/lightkv/src/engines/lightkv/partition.rs": "publishes and frees views by epoch",
    "crates/lightkv/src/engines/lightkv/read.rs": RECORDS,
    "crates/lightkv/src/engines/lightkv/pool_image.rs": RECORDS,
    "crates/lightkv/src/engines/lightkv/recovery/restore.rs": RECORDS,
    "crates/lightkv/src/engines/lightkv/room.rs": RECORDS,
    "crates/lightkv/src/engines/lightkv/scan_source.rs": RECORDS,
    "crates/lightkv/src/engines/lightkv/sorted_view.rs": RECORDS,
    "crates/lightkv/src/engines/lightkv/store.rs": "publishes and frees the tree by epoch",
    "crates/lightkv/src/engines/lightkv/top_leaf.rs": "reads buckets that a writer may be changing",
    "crates/lightkv/src/engines/lightkv/top_leaf/loom_tests.rs": "tests that argument",
    "crates/lightkv/src/engines/lightkv/verify.rs": RECORDS,
    "crates/lightkv/src/engines/lightkv/write.rs": RECORDS,
    "crates/lightkv/src/engines/scheduling.rs": "makes a system call that rustix does not have",
    "crates/lightkv/tests/kill/power_loss/volume.rs": "shuts a file system down",
    "crates/memory/src/fault_in.rs": "touches pages without changing a byte",
    "crates/memory/src/mapped_vec.rs": "stores elements in mapped memory",
    "crates/memory/src/mapping.rs": "maps memory",
    "crates/memory/src/shared_bytes.rs": "stores and counts references in such memory",
    "crates/memory/src/zeroed_slice.rs": "makes slices of mapped memory",
    "crates/pmem/src/access.rs": "checks ranges and hands them to the stores",
    "crates/pmem/src/emulated.rs": "takes the state that a crash leaves",
    "crates/pmem/src/map.rs": "reserves address space and maps extents into it",
    "crates/pmem/src/pool.rs": "shares the mapping between threads, copies into it, drops pages",
    "crates/pmem/src/portable.rs": "stores and flushes without special instructions",
    "crates/pmem/src/store.rs": "copies into and out of pools",
    "crates/pmem/src/x86.rs": "flush, fence and 16-byte instructions",
    "crates/pmem/tests/it/memory.rs": "calls what is tested",
    "crates/vfs/src/memory/region.rs": "memory behind mapped files that are in memory",
    "crates/vfs/src/memory/tests.rs": "stores into such a file",
    "crates/vfs/src/real.rs": "declares and calls sync_file_range",
    "crates/vfs/src/real/cached_pages.rs": "asks, in tests, what the page cache holds",
    "crates/vfs/src/real/mapping.rs": "maps files",
    "crates/vfs/src/real/ring.rs": "hands memory of its own to the kernel to read into",
}

# Markdown links: [text](target), not images of other sites, not inside code.
LINK = re.compile(r"(?<!\\)\[[^\]\n]*\]\(([^)\s]+)\)")


def files() -> list[str]:
    """Every file that is or would be committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    listed = sorted(name for name in names.decode().split("\0") if name)
    return [name for name in listed if (ROOT / name).is_file()]


def text_problems(name: str, text: str) -> Iterator[str]:
    """Form: length, white space, unfinished work."""
    lines = text.split("\n")
    if len(lines) > LINES_MAX:
        yield f"{name}: {len(lines)} lines, {LINES_MAX} are the most; split it"
    if text and not text.endswith("\n"):
        yield f"{name}: the last line has no end"
    for number, line in enumerate(lines, 1):
        if "\t" in line:
            yield f"{name}:{number}: a tab"
        if line != line.rstrip():
            yield f"{name}:{number}: white space at the end"
        if found := UNFINISHED.search(line):
            yield f"{name}:{number}: {found[0]}; finish it or open an issue"


RUST_NOISE = re.compile(
    r"""
      (?P<line>//[^\n]*)
    | (?P<block>/\*.*?\*/)
    | (?P<raw>\bb?c?r(?P<hashes>\#*)".*?"(?P=hashes))
    | (?P<string>\bb?c?"(?:\\.|[^"\\])*"|"(?:\\.|[^"\\])*")
    | (?P<char>b?'(?:\\.[^']*|[^'\\])')
    """,
    re.VERBOSE | re.DOTALL,
)


def rust_code(text: str) -> str:
    """Rust source with comments and literals blanked, line by line in place."""
    return RUST_NOISE.sub(lambda noise: re.sub(r"[^\n]", " ", noise[0]), text)


def rust_problems(name: str, text: str) -> Iterator[str]:
    """A header that says what the file is for (its tests need none); unsafe only where listed."""
    if not text.startswith("//!") and not name.endswith("/tests.rs"):
        yield f"{name}: no //! header; say what the file is for"
    if any(name == place or name.startswith(f"{place}/") for place in UNSAFE):
        return
    for number, line in enumerate(rust_code(text).split("\n"), 1):
        if re.search(r"\bunsafe\b", line):
            yield f"{name}:{number}: unsafe outside of the modules listed in ci/tidy.py"


def unsafe_list_problems(texts: dict[str, str]) -> Iterator[str]:
    """Entries of the list of unsafe modules that allow nothing any more."""
    for place in UNSAFE:
        covered = [n for n in texts if n == place or n.startswith(f"{place}/")]
        if not any(re.search(r"\bunsafe\b", rust_code(texts[n])) for n in covered):
            yield f"ci/tidy.py: {place} has no unsafe code; take it off the list"


def format_problems(names: list[str], texts: dict[str, str]) -> Iterator[str]:
    """Every layout on media is described byte for byte on a page that names its code."""
    pages = [text for name, text in texts.items() if name.startswith("docs/format/")]
    for name in names:
        file = pathlib.PurePosixPath(name).name
        if file.endswith("_layout.rs") and not any(file in page for page in pages):
            yield f"{name}: no page of docs/format names it; describe the format byte for byte"


DOC_FENCE = re.compile(r"^\s*//[/!] ?```(.*)$", re.MULTILINE)


def example_problems(texts: dict[str, str]) -> Iterator[str]:
    """Where building examples of documentation is switched off, to save its time, there are none."""
    for manifest, text in texts.items():
        if not manifest.endswith("Cargo.toml") or not re.search(r"^doctest = false", text, re.MULTILINE):
            continue
        for name in texts:
            if not name.startswith(f"{pathlib.PurePosixPath(manifest).parent}/src/"):
                continue
            # Every other fence ends a block.
            if {"", "rust", "no_run", "should_panic", "compile_fail"} & set(DOC_FENCE.findall(texts[name])[::2]):
                yield f"{name}: an example, but {manifest} says doctest = false; take that out"


def anchors(text: str) -> set[str]:
    """Names under which the headings of a page can be linked to."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_code_blocks(text), re.MULTILINE):
        plain = LINK.sub(lambda link: link[0].split("](")[0][1:], heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = 0
        unique = slug
        while unique in found:
            count += 1
            unique = f"{slug}-{count}"
        found.add(unique)
    return found


def without_code_blocks(text: str) -> str:
    """Markdown with fenced blocks blanked, lines kept."""
    blank = lambda block: re.sub(r"[^\n]", "", block[0])
    return re.sub(r"^```.*?^```", blank, text, flags=re.DOTALL | re.MULTILINE)


def link_problems(name: str, text: str, texts: dict[str, str]) -> Iterator[str]:
    """Links inside the project lead somewhere."""
    prose = re.sub(r"`[^`\n]*`", "", without_code_blocks(text))
    for number, line in enumerate(prose.split("\n"), 1):
        for target in LINK.findall(line):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            path, _, anchor = target.partition("#")
            resolved = (ROOT / name).parent / path if path else ROOT / name
            resolved = resolved.resolve()
            if not resolved.is_relative_to(ROOT) or not resolved.exists():
                yield f"{name}:{number}: {target} leads nowhere"
                continue
            page = resolved.relative_to(ROOT).as_posix()
            if anchor and anchor not in anchors(texts.get(page, "")):
                yield f"{name}:{number}: {page} has no heading #{anchor}"


def patch_problem(name: str, patch: str) -> str | None:
    """A seeded bug whose patch does not apply any more is one that nothing has to catch."""
    command = ["git", "apply", "--check", "-"]
    applied = subprocess.run(command, cwd=ROOT, input=patch, stderr=subprocess.PIPE, text=True, check=False)
    if applied.returncode == 0:
        return None
    return f"{name}: does not apply: {applied.stderr.splitlines()[0].removeprefix('error: ')}"


def main() -> None:
    names = files()
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in names
        if pathlib.PurePosixPath(name).suffix in SUFFIXES or name in EXTENSIONLESS
    }
    problems: list[str] = []
    for name, text in texts.items():
        problems += text_problems(name, text)
        if name.endswith(".rs"):
            problems += rust_problems(name, text)
        if name.endswith(".md"):
            problems += link_problems(name, text, texts)
    problems += unsafe_list_problems(texts)
    problems += format_problems(names, texts)
    problems += example_problems(texts)
    patches = [name for name in names if name.endswith(".patch")]
    found = [patch_problem(name, (ROOT / name).read_text(encoding="utf-8")) for name in patches]
    problems += [problem for problem in found if problem]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    print(f"{len(texts)} files are tidy, {len(patches)} patches apply")


if __name__ == "__main__":
    main()
