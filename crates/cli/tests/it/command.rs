//! Runs the command on a store of its own.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// The shipped data set.
pub(crate) fn data_set() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/unicode-characters.tsv")
}

/// A store that does not exist until a command creates it.
pub(crate) struct Store {
    directory: TempDir,
}

/// How a command ended.
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Store {
    pub(crate) fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    /// The store's directory.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("store")
    }

    /// A file beside it.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The command with this store's --dir.
    pub(crate) fn command<I: AsRef<OsStr>>(&self, arguments: &[I]) -> Command {
        let mut command = bare_command(arguments);
        command.arg("--dir").arg(self.path());
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run<I: AsRef<OsStr>>(&self, arguments: &[I]) -> Ended {
        run(self.command(arguments), b"")
    }

    /// Runs a command with some input to its end.
    pub(crate) fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> Ended {
        run(self.command(arguments), input)
    }

    /// Runs a command that must succeed and returns what it printed.
    pub(crate) fn must<I: AsRef<OsStr>>(&self, arguments: &[I]) -> String {
        self.run(arguments).succeeded()
    }
}

impl Ended {
    /// What a successful command printed.
    pub(crate) fn succeeded(self) -> String {
        assert_eq!(self.code, 0, "stderr: {}", self.stderr);
        String::from_utf8(self.stdout).unwrap()
    }

    /// Checks exit code and printed error of a command that failed: one line, with these parts.
    pub(crate) fn failed(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "stderr: {}", self.stderr);
        assert_eq!(self.stdout, b"", "nothing on stdout");
        assert!(self.stderr.starts_with("error: "), "{}", self.stderr);
        assert_eq!(self.stderr.trim_end().lines().count(), 1, "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} in {:?}", self.stderr);
        }
    }
}

/// The command without a store.
pub(crate) fn bare_command<I: AsRef<OsStr>>(arguments: &[I]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lightkv"));
    command.args(arguments);
    command
}

/// Runs a command with some input to its end.
pub(crate) fn run(mut command: Command, input: &[u8]) -> Ended {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // A thread, so that neither side waits for the other's full pipe. A command that fails early
    // closes its input.
    let feeder = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    Ended {
        code: output.status.code().expect("ended by itself"),
        stdout: output.stdout,
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Parses one line of JSON.
pub(crate) fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}
