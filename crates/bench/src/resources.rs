//! What a workload used, as the kernel counts it: the same for every store, whatever it says of itself.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::time::{ClockId, clock_gettime};

/// Bytes of a sector in the kernel's block statistics, whatever the device's own are.
const SECTOR_LEN_BYTES: u64 = 512;

/// Finds the device below a store once, and reads the counters of process and device.
#[derive(Debug)]
pub(crate) struct Resources {
    /// Statistics of the block device that holds the store's directory.
    disk_statistics: Option<PathBuf>,
    directory: Option<PathBuf>,
}

/// A reading, or the growth between two.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Usage {
    /// Processor time of all threads of the process, ended ones and the kernel's share included.
    pub(crate) cpu_seconds: f64,
    /// Bytes that the process made dirty in files of block devices.
    pub(crate) process_bytes_written: Option<u64>,
    /// Bytes that the device was told to write, whoever told it.
    pub(crate) disk_bytes_written: Option<u64>,
    /// Reads that the device completed, whoever asked.
    pub(crate) disk_reads: Option<u64>,
    /// Bytes of these reads.
    pub(crate) disk_bytes_read: Option<u64>,
    /// How long they took, all together.
    pub(crate) disk_read_seconds: Option<f64>,
}

impl Resources {
    /// For a store in this directory.
    pub(crate) fn new(directory: Option<&Path>) -> Self {
        Self {
            disk_statistics: directory.and_then(disk_statistics),
            directory: directory.map(Path::to_owned),
        }
    }

    pub(crate) fn usage(&self) -> Usage {
        let disk = self.disk_statistics.as_deref();
        // Read once, so that the figures are of one moment.
        let disk = disk.and_then(|path| fs::read_to_string(path).ok());
        let number = |place| parse_statistic(disk.as_deref()?, place);
        let bytes = |place| Some(number(place)? * SECTOR_LEN_BYTES);
        Usage {
            cpu_seconds: cpu_seconds(),
            process_bytes_written: read_number("/proc/self/io", parse_write_bytes),
            disk_bytes_written: bytes(SECTORS_WRITTEN),
            disk_reads: number(READS),
            disk_bytes_read: bytes(SECTORS_READ),
            disk_read_seconds: number(READ_MILLISECONDS).map(|time_ms| time_ms as f64 / 1e3),
        }
    }

    /// Writes back what is dirty in the file system of the store, so that the device has counted it.
    /// Best effort: a refusal leaves it for later, and the figure smaller.
    pub(crate) fn write_back(&self) {
        if let Some(directory) = &self.directory
            && let Ok(file) = File::open(directory)
        {
            let _refused = rustix::fs::syncfs(&file);
        }
    }
}

impl Usage {
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let growth = |now: Option<u64>, before: Option<u64>| Some(now?.saturating_sub(before?));
        Self {
            cpu_seconds: self.cpu_seconds - earlier.cpu_seconds,
            process_bytes_written: growth(
                self.process_bytes_written,
                earlier.process_bytes_written,
            ),
            disk_bytes_written: growth(self.disk_bytes_written, earlier.disk_bytes_written),
            disk_reads: growth(self.disk_reads, earlier.disk_reads),
            disk_bytes_read: growth(self.disk_bytes_read, earlier.disk_bytes_read),
            disk_read_seconds: self
                .disk_read_seconds
                .zip(earlier.disk_read_seconds)
                .map(|(now, before)| now - before),
        }
    }
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Where the kernel shows the statistics of the device below a directory; `None` where there is no
/// single one, as for tmpfs, overlays and volumes of several devices.
fn disk_statistics(directory: &Path) -> Option<PathBuf> {
    let device = fs::metadata(directory).ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let path = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/stat"));
    path.exists().then_some(path)
}

fn read_number(path: impl AsRef<Path>, parse: fn(&str) -> Option<u64>) -> Option<u64> {
    parse(&fs::read_to_string(path).ok()?)
}

fn parse_write_bytes(io: &str) -> Option<u64> {
    let mut lines = io.lines();
    let number = lines.find_map(|line| line.strip_prefix("write_bytes:"))?;
    number.trim().parse().ok()
}

/// Places in the line that Documentation/block/stat describes.
const READS: usize = 0;
const SECTORS_READ: usize = 2;
const READ_MILLISECONDS: usize = 3;
const SECTORS_WRITTEN: usize = 6;

fn parse_statistic(statistics: &str, place: usize) -> Option<u64> {
    statistics.split_whitespace().nth(place)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_forms() {
        let io = "wchar: 9\nwrite_bytes: 4096\ncancelled_write_bytes: 7\n";
        assert_eq!(parse_write_bytes(io), Some(4_096));
        assert_eq!(parse_write_bytes("wchar: 9\n"), None);
        let statistics = "  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17\n";
        let places = [READS, SECTORS_READ, READ_MILLISECONDS, SECTORS_WRITTEN];
        let found = places.map(|place| parse_statistic(statistics, place));
        assert_eq!(found, [Some(1), Some(3), Some(4), Some(7)]);
        assert_eq!(parse_statistic("1 2 3", SECTORS_WRITTEN), None);
    }

    #[test]
    fn work_of_every_thread_is_counted() {
        let resources = Resources::new(None);
        let before = resources.usage();
        let spin = || {
            let own_time = || clock_gettime(ClockId::ThreadCPUTime);
            let begin = own_time();
            while (own_time() - begin).tv_nsec < 20_000_000 {
                std::hint::spin_loop();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(spin);
            scope.spawn(spin);
        });
        let used = resources.usage().since(&before);
        // Other tests run beside this one, so there is no upper bound.
        assert!(used.cpu_seconds >= 0.04, "{used:?}");
        assert_eq!(used.disk_bytes_written, None);
    }

    #[test]
    fn bytes_that_reach_a_device_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let resources = Resources::new(Some(directory.path()));
        let before = resources.usage();
        let file = directory.path().join("file");
        fs::write(&file, vec![1; 4 << 20]).unwrap();
        resources.write_back();
        let used = resources.usage().since(&before);
        // Where the directory lies on tmpfs, nothing was written to any device.
        if resources.disk_statistics.is_some() {
            assert!(
                used.process_bytes_written
                    .is_none_or(|bytes| bytes >= 4 << 20)
            );
            assert!(used.disk_bytes_written.unwrap() >= 4 << 20, "{used:?}");
            assert!(used.disk_reads.is_some() && used.disk_read_seconds.unwrap() >= 0.0);
        }
    }
}
