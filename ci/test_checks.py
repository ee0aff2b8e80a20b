#!/usr/bin/env python3
"""Tests of the checks themselves: each must find what it is there to find."""

import unittest

import check_dependencies
import readme_command
import tidy


class Licences(unittest.TestCase):
    def test_expressions(self) -> None:
        for text, allowed in [
            ("MIT OR Apache-2.0", True),
            ("MIT/Apache-2.0", True),
            ("(MIT OR GPL-3.0) AND Unicode-3.0", True),
            ("Apache-2.0 WITH LLVM-exception", True),
            ("GPL-2.0 WITH LLVM-exception OR MIT", True),
            ("GPL-3.0", False),
            ("MIT AND GPL-3.0", False),
            ("Apache-2.0 WITH Unknown-exception", False),
        ]:
            self.assertEqual(check_dependencies.Expression(text).allowed(), allowed, text)
        for text in ["", "MIT OR", "(MIT", "MIT Apache-2.0"]:
            package = {"license": text}
            self.assertIsNotNone(check_dependencies.licence_problem(package), text)

    def test_sources(self) -> None:
        for source in ["git+https://example.invalid/x", "registry+https://example.invalid/index"]:
            package = {"source": source}
            self.assertIsNotNone(check_dependencies.source_problem(package, tidy.ROOT))

    def test_duplicates(self) -> None:
        def problems(*versions: str) -> list[str]:
            packages = [{"name": "x", "version": version} for version in versions]
            found = check_dependencies.duplicate_problems(packages)
            return [problem for problem in found if problem.startswith("x:")]

        self.assertEqual(problems("1.2.0", "1.9.1+build"), [])
        self.assertEqual(len(problems("1.2.0", "2.0.0")), 1)
        self.assertEqual(len(problems("0.4.0", "0.5.0")), 1)
        self.assertEqual(len(problems("0.0.4", "0.0.5")), 1)


class Tidy(unittest.TestCase):
    def test_text(self) -> None:
        self.assertEqual(list(tidy.text_problems("a.rs", "fine\n")), [])
        unfinished = "// TO" + "DO later\n"
        for text in ["space \n", "\ttab\n", "no end", unfinished, "x\n" * 1_300]:
            self.assertNotEqual(list(tidy.text_problems("a.rs", text)), [], text[:20])

    def test_unsafe(self) -> None:
        def problems(code: str) -> list[str]:
            return list(tidy.rust_problems("a.rs", f"//! A.\n{code}\n"))

        for code in [
            "// unsafe",
            "/* unsafe */ fn f<'a>(x: &'a str) {}",
            'let x = "unsafe"; let y = \'"\';',
            'let x = r#"unsafe "quoted""#;',
            r"let x = b'\''; let y = b'\\';",
        ]:
            self.assertEqual(problems(code), [], code)
        for code in [
            "fn f<'a>(x: &'a str, y: &'a u8) { unsafe { g() } }",
            "let q = b'\"'; let y = '\\''; unsafe { g() }",
            "unsafe impl Send for X {}",
        ]:
            self.assertNotEqual(problems(code), [], code)
        self.assertNotEqual(list(tidy.rust_problems("a.rs", "fn f() {}\n")), [])

    def test_patches(self) -> None:
        new_file = "A seeded bug.\n\n--- /dev/null\n+++ b/no/such/file\n@@ -0,0 +1 @@\n+x\n"
        self.assertIsNone(tidy.patch_problem("a.patch", new_file))
        stale = "A seeded bug.\n\n--- a/ci/tidy.py\n+++ b/ci/tidy.py\n@@ -1 +1 @@\n-never written\n+x\n"
        self.assertIsNotNone(tidy.patch_problem("a.patch", stale))

    def test_layouts(self) -> None:
        names = ["crates/x/src/y_layout.rs"]
        self.assertNotEqual(list(tidy.format_problems(names, {})), [])
        pages = {"docs/format/y.md": "Code: `y_layout.rs`"}
        self.assertEqual(list(tidy.format_problems(names, pages)), [])

    def test_examples(self) -> None:
        code = {"crates/x/src/lib.rs": "/// ```text\n/// ```\n/// ```\n/// f();\n/// ```\n"}
        silent = {"crates/x/Cargo.toml": "[lib]\ndoctest = false\n"}
        self.assertNotEqual(list(tidy.example_problems(code | silent)), [])
        text_only = {"crates/x/src/lib.rs": "/// ```text\n/// f();\n/// ```\n"}
        self.assertEqual(list(tidy.example_problems(text_only | silent)), [])
        self.assertEqual(list(tidy.example_problems(code | {"crates/x/Cargo.toml": "[lib]\n"})), [])

    def test_links(self) -> None:
        pages = {"data/README.md": "# A\n\n## The `b`, c\n"}
        for line, count in [
            ("[a](data/README.md) [b](https://example.invalid)", 0),
            ("[a](data/README.md#the-b-c)", 0),
            ("`[a](nowhere.md)`", 0),
            ("[a](nowhere.md)", 1),
            ("[a](data/README.md#d)", 1),
            ("[a](../elsewhere)", 1),
        ]:
            found = list(tidy.link_problems("README.md", line, pages))
            self.assertEqual(len(found), count, line)


class Readme(unittest.TestCase):
    def test_command(self) -> None:
        text = "text\n<!-- command: a -->\n```sh\none\ntwo\n```\n"
        self.assertEqual(readme_command.command(text, "a"), "one\ntwo")
        for broken in ["", text + text]:
            with self.assertRaises(SystemExit):
                readme_command.command(broken, "a")


if __name__ == "__main__":
    unittest.main()
