//! A file system in a file, on a loop device, whose power can be cut.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use lightkv_vfs::Mapping;

/// The ioctl that ext4 and XFS share, `FS_IOC_SHUTDOWN`: from now on nothing reaches the medium.
const SHUTDOWN: rustix::ioctl::Opcode = rustix::ioctl::opcode::read::<u32>(b'X', 125);
/// The file system's own log is written out first: as if the power had gone a moment later.
const AFTER_LOG_FLUSH: u32 = 1;
/// What the file system has not written is lost.
const AT_ONCE: u32 = 2;

/// Sparse, so that it takes what is written to it. XFS refuses less than 300 MiB.
const IMAGE_BYTES: u64 = 512 << 20;

/// How long a volume may be busy after its last user has died, and how often that is looked at.
const BUSY_MAX: Duration = Duration::from_secs(20);
const BUSY_INTERVAL: Duration = Duration::from_millis(10);

/// A file system that can lose power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileSystem {
    Ext4,
    Xfs,
}

/// A mounted file system; unmounted when dropped.
#[derive(Debug)]
pub(crate) struct Volume {
    image: PathBuf,
    mount_point: PathBuf,
}

/// Whether a file system can hold a volume that is written full.
pub(crate) fn has_room(directory: &Path) -> bool {
    rustix::fs::statvfs(directory)
        .is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) >= IMAGE_BYTES)
}

impl FileSystem {
    /// As in counts.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    fn make(self) -> &'static [&'static str] {
        match self {
            // Without initialising in the background, which would write beside the store.
            Self::Ext4 => &[
                "mkfs.ext4",
                "-q",
                "-F",
                "-E",
                "lazy_itable_init=0,lazy_journal_init=0",
            ],
            Self::Xfs => &["mkfs.xfs", "-q", "-f"],
        }
    }
}

impl Volume {
    /// Makes and mounts one within a directory. An error says what this machine lacks for that.
    pub(crate) fn create(file_system: FileSystem, directory: &Path) -> Result<Self, String> {
        let volume = Self {
            image: directory.join("image"),
            mount_point: directory.join("volume"),
        };
        let image = File::create(&volume.image).expect("a file for the volume");
        image.set_len(IMAGE_BYTES).expect("a sparse file");
        std::fs::create_dir(&volume.mount_point).expect("a directory to mount at");
        let [program, options @ ..] = file_system.make() else {
            unreachable!("a program and its options")
        };
        execute(Command::new(program).args(options).arg(&volume.image))?;
        volume.mount()?;
        Ok(volume)
    }

    /// Where its files are.
    pub(crate) fn path(&self) -> &Path {
        &self.mount_point
    }

    fn mount(&self) -> Result<(), String> {
        let mut command = Command::new("mount");
        execute(
            command
                .args(["-o", "loop"])
                .arg(&self.image)
                .arg(&self.mount_point),
        )
    }

    /// The kernel may still hold files of a process that has just died.
    fn unmount(&self) -> Result<(), String> {
        let start = Instant::now();
        loop {
            let outcome = execute(Command::new("umount").arg(&self.mount_point));
            let is_busy = outcome
                .as_ref()
                .is_err_and(|message| message.contains("busy"));
            if !is_busy || start.elapsed() > BUSY_MAX {
                return outcome;
            }
            std::thread::sleep(BUSY_INTERVAL);
        }
    }

    /// Cuts the power: reads and writes fail until the next [`Volume::restart`].
    pub(crate) fn cut_power(&self, is_log_flushed: bool) {
        let root = File::open(&self.mount_point).expect("the root of the volume");
        let how = if is_log_flushed {
            AFTER_LOG_FLUSH
        } else {
            AT_ONCE
        };
        // SAFETY: the request reads one number of four bytes, which `Setter` points to, and changes no memory.
        unsafe {
            let request = rustix::ioctl::Setter::<SHUTDOWN, u32>::new(how);
            rustix::ioctl::ioctl(&root, request).expect("the power is cut");
        }
    }

    /// Mounts it anew, which has the file system replay its log. Nobody may use it.
    pub(crate) fn restart(&self) {
        self.unmount().unwrap_or_else(|error| panic!("{error}"));
        self.mount().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Memory of a limited size, in which a volume can run out of blocks that it believes to have.
#[derive(Debug)]
pub(crate) struct ThinMemory(PathBuf);

impl ThinMemory {
    /// Mounts it within a directory. An error says what this machine lacks for that.
    pub(crate) fn create(directory: &Path, len_bytes: u64) -> Result<Self, String> {
        let mount_point = directory.join("memory");
        std::fs::create_dir(&mount_point).expect("a directory to mount at");
        let mut command = Command::new("mount");
        let size = format!("size={len_bytes}");
        execute(
            command
                .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
                .arg(&mount_point),
        )?;
        Ok(Self(mount_point))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Takes all that is left of it: writes to new blocks of a volume in it fail from now on.
    pub(crate) fn fill(&self) {
        let mut file = File::create(self.0.join("filling")).expect("a file");
        while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
    }
}

impl Drop for ThinMemory {
    fn drop(&mut self) {
        // As below.
        let _ = execute(Command::new("umount").arg(&self.0));
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // Not mounted if it was never created wholly; nothing can be done about anything else.
        let _ = self.unmount();
    }
}

/// Stores to a mapped file.
pub(crate) fn store(mapping: &mut dyn Mapping, offset: usize, byte: u8) {
    assert!(offset < mapping.len(), "within the mapping");
    // SAFETY: By the assertion it is within the mapping, which is this caller's alone.
    unsafe { mapping.as_ptr().add(offset).write(byte) };
}

fn execute(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        Ok(())
    } else {
        let message = String::from_utf8_lossy(&output.stderr);
        Err(format!("{name}: {}", message.trim()))
    }
}
