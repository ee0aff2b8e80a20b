//! What a child tells its parent: numbers in files that both have open.
//!
//! A number that was written survives the writer's death, because the page cache belongs to the kernel. One
//! file for each thread, so that threads do not wait for each other's writes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::plan::THREADS;

/// How far a child has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Not yet opened.
    Starting,
    /// The store is open.
    Opened,
    /// All that it holds was checked.
    Verified,
}

/// How far a thread has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ThreadProgress {
    /// Number of the operation that was begun last.
    pub(crate) started: u64,
    /// Number of the operation that was acknowledged last.
    pub(crate) acknowledged: u64,
    /// The last operation whose fate a reopen found out: its number times two, plus one if it was
    /// applied.
    pub(crate) resolved: u64,
}

/// Is told how far the writers have come.
pub(crate) trait Listener: Sync {
    /// A write begins.
    fn start(&self, thread: usize, number: u64);
    /// A write has returned.
    fn acknowledge(&self, thread: usize, number: u64);
    /// A write that was in flight when the last process died was found applied, or not.
    fn resolve(&self, thread: usize, number: u64, is_applied: bool);
}

/// The files.
#[derive(Debug)]
pub(crate) struct Progress {
    phase: File,
    threads: Vec<File>,
}

impl Progress {
    /// Opens the files in a directory, creating them with zeros.
    pub(crate) fn open(directory: &Path) -> Self {
        let open = |name: String| {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(directory.join(name))
                .expect("a file for acknowledgements");
            if file.metadata().expect("its length").len() == 0 {
                file.set_len(24).expect("space for acknowledgements");
            }
            file
        };
        Self {
            phase: open("phase".into()),
            threads: (0..THREADS)
                .map(|thread| open(format!("thread-{thread}")))
                .collect(),
        }
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        write(&self.phase, phase as u64, 0);
    }

    pub(crate) fn phase(&self) -> Phase {
        match read(&self.phase, 0) {
            0 => Phase::Starting,
            1 => Phase::Opened,
            _ => Phase::Verified,
        }
    }

    pub(crate) fn thread(&self, thread: usize) -> ThreadProgress {
        let file = &self.threads[thread];
        ThreadProgress {
            started: read(file, 0),
            acknowledged: read(file, 8),
            resolved: read(file, 16),
        }
    }
}

impl Listener for Progress {
    fn start(&self, thread: usize, number: u64) {
        write(&self.threads[thread], number, 0);
    }

    fn acknowledge(&self, thread: usize, number: u64) {
        write(&self.threads[thread], number, 8);
    }

    fn resolve(&self, thread: usize, number: u64, is_applied: bool) {
        write(
            &self.threads[thread],
            number * 2 + u64::from(is_applied),
            16,
        );
    }
}

fn write(file: &File, number: u64, offset: u64) {
    file.write_all_at(&number.to_le_bytes(), offset)
        .expect("an acknowledgement");
}

fn read(file: &File, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, offset)
        .expect("an acknowledgement");
    u64::from_le_bytes(bytes)
}
