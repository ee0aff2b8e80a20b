//! A memory limit for one child process, page cache included: a control group of its own, version 1 or 2.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// Where the version 1 controller is mounted everywhere.
const VERSION_1_ROOT: &str = "/sys/fs/cgroup/memory";

/// Where version 2 is mounted everywhere.
const VERSION_2_ROOT: &str = "/sys/fs/cgroup";

/// Beginning of every group's name; the process that made it follows.
const NAME: &str = "lightkv-bench-peers-";

/// Files that differ between the versions of the interface.
#[derive(Debug)]
struct Names {
    limit: &'static str,
    peak: &'static str,
    /// Holds a line `oom_kill N`.
    kills: &'static str,
    /// Takes swap away, where there is any.
    swap: (&'static str, Swap),
}

#[derive(Clone, Copy, Debug)]
enum Swap {
    /// The limit of memory and swap together.
    WithMemory,
    /// The limit of swap alone.
    Alone,
}

const VERSION_1: Names = Names {
    limit: "memory.limit_in_bytes",
    peak: "memory.max_usage_in_bytes",
    kills: "memory.oom_control",
    swap: ("memory.memsw.limit_in_bytes", Swap::WithMemory),
};

const VERSION_2: Names = Names {
    limit: "memory.max",
    peak: "memory.peak",
    kills: "memory.events",
    swap: ("memory.swap.max", Swap::Alone),
};

/// A control group that limits memory. Dropped, it is removed; its processes must have ended.
#[derive(Debug)]
pub(crate) struct Cgroup {
    directory: PathBuf,
    names: &'static Names,
}

impl Cgroup {
    /// A new group with a limit in bytes; one at a time in a process.
    ///
    /// # Errors
    /// Where this process may not make groups or the memory controller is missing.
    pub(crate) fn new(limit_bytes: u64) -> io::Result<Self> {
        let version_1 = Path::new(VERSION_1_ROOT).join(VERSION_1.limit).exists();
        let (root, names) = if version_1 {
            (VERSION_1_ROOT, &VERSION_1)
        } else {
            (VERSION_2_ROOT, &VERSION_2)
        };
        remove_abandoned(Path::new(root));
        let directory = Path::new(root).join(format!("{NAME}{}", std::process::id()));
        fs::create_dir(&directory)?;
        // From here on dropping removes it.
        let group = Self { directory, names };
        group.write(names.limit, &limit_bytes.to_string())?;
        let (swap, kind) = names.swap;
        if group.directory.join(swap).exists() {
            let limit_bytes = match kind {
                Swap::WithMemory => limit_bytes,
                Swap::Alone => 0,
            };
            group.write(swap, &limit_bytes.to_string())?;
        }
        Ok(group)
    }

    /// Moves a process into the group. What it allocated before stays where it was.
    pub(crate) fn add(&self, process: u32) -> io::Result<()> {
        self.write("cgroup.procs", &process.to_string())
    }

    /// The most that was charged so far, page cache included, in bytes; `None` if the kernel does not tell.
    pub(crate) fn peak_bytes(&self) -> Option<u64> {
        self.read(self.names.peak)?.trim().parse().ok()
    }

    /// Whether the kernel killed a process of the group for want of memory.
    pub(crate) fn killed(&self) -> bool {
        self.read(self.names.kills)
            .is_some_and(|text| kills(&text) > 0)
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.directory.join(name)).ok()
    }

    fn write(&self, name: &str, text: &str) -> io::Result<()> {
        fs::write(self.directory.join(name), text)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Version 1 keeps the page cache of a removed group charged to it; version 2 has no such file and needs none.
        let _absent = self.write("memory.force_empty", "0");
        if let Err(error) = fs::remove_dir(&self.directory) {
            eprintln!(
                "note: {} was not removed: {error}",
                self.directory.display()
            );
        }
    }
}

/// Removes groups whose makers were killed. Best effort: an empty group costs nothing but its name.
fn remove_abandoned(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(NAME));
        if maker.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _busy = fs::remove_dir(entry.path());
        }
    }
}

fn kills(text: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))
        .and_then(|number| number.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_found_in_both_forms() {
        assert_eq!(kills("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"), 2);
        assert_eq!(kills("low 0\noom 3\noom_kill 1\noom_group_kill 0\n"), 1);
        assert_eq!(kills("oom_kill_disable 0\nunder_oom 0\n"), 0);
    }

    #[test]
    fn a_group_limits_or_is_refused() {
        // Most machines that run tests do not permit it.
        let Ok(group) = Cgroup::new(64 << 20) else {
            return;
        };
        let limit_bytes: u64 = group
            .read(group.names.limit)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert_eq!(limit_bytes, 64 << 20);
        assert!(!group.killed());
        let directory = group.directory.clone();
        drop(group);
        assert!(!directory.exists());
    }
}
