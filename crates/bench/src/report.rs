//! What a workload reports: one line of JSON each.

use serde::{Deserialize, Serialize};

use crate::latency::LatencySummary;
use crate::series::SecondReport;
use crate::target::Numbers;

/// Figures of one workload. Serialised by serde it has exactly these names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Report {
    /// Name of the workload.
    pub workload: String,
    /// Name of the store: [`crate::Target::name`].
    pub engine: String,
    /// What the writes of this run survive: [`crate::DurabilityClass::name`]. Figures of different classes
    /// must not be compared.
    pub durability: String,
    /// Threads that shared the operations, without writers beside readers.
    pub threads: usize,
    /// The rate asked for of an open loop; `None` for a closed one.
    pub rate_ops_per_second: Option<f64>,
    /// Operations: puts, deletes, gets, scans, entries (`readseq`), pairs of a get and a put
    /// (`readmodifywrite` and its part of `ycsbf`). Those of writers beside readers are among them.
    pub ops: u64,
    /// From the start of the threads to the end of the last, in seconds; without settling.
    pub seconds: f64,
    /// `ops` / `seconds`.
    pub ops_per_second: f64,
    /// The same of the slowest whole second in which all threads were at work; `None` if there was none.
    pub slowest_second_ops_per_second: Option<f64>,
    /// Latency of gets, in microseconds, until the value is there; its check comes after that. In an open
    /// loop, this and the next three count from when the operation was due.
    pub read_us: Option<LatencySummary>,
    /// Latency of puts and deletes, in microseconds.
    pub write_us: Option<LatencySummary>,
    /// Latency of whole scans, the checks of their entries included, or of single steps (`readseq`), in
    /// microseconds.
    pub scan_us: Option<LatencySummary>,
    /// Latency of a get, its check and a put of the same key together, in microseconds; get and put are
    /// in `read_us` and `write_us` too.
    pub read_modify_write_us: Option<LatencySummary>,
    /// Bytes of keys and values put, and of keys deleted.
    pub user_bytes_written: u64,
    /// Bytes that the store counts as written to its device until the end of the workload, those of
    /// background work that earlier workloads left included; `None` if it does not count. LightKV counts
    /// journal, tables and value files, not a pool: that has a counter of its own.
    pub device_bytes_written: Option<u64>,
    /// `device_bytes_written` / `user_bytes_written`; `None` if nothing was put.
    pub write_amplification: Option<f64>,
    /// Bytes that the process made dirty in files of block devices, as `/proc/self/io` counts them: pages
    /// and whole large folios where only a part was written, files deleted before they were written back
    /// included; files on tmpfs not.
    pub process_bytes_written: Option<u64>,
    /// Bytes that the kernel sent to the device below the store's directory, from anybody: file system
    /// metadata and other processes included, what is still in the page cache not; `None` if the
    /// directory is on no single block device.
    pub disk_bytes_written: Option<u64>,
    /// Reads that the device completed, for anybody, each as large as the kernel made it; `None` as above.
    #[serde(default)]
    pub disk_reads: Option<u64>,
    /// Bytes that the device read, for anybody.
    #[serde(default)]
    pub disk_bytes_read: Option<u64>,
    /// Time that each of these reads took, all together, in seconds: divided by `seconds` it is how many
    /// were under way on average, divided by `disk_reads` how long one took.
    #[serde(default)]
    pub disk_read_seconds: Option<f64>,
    /// Bytes of the store's files at the end.
    pub space_bytes: u64,
    /// Peak resident memory of the process during the workload, in bytes, mapped files included; the
    /// page cache is not.
    pub memory_peak_bytes: u64,
    /// Processor time of all threads of the process, the kernel's share included, in seconds: workload,
    /// measuring and background work, also what earlier workloads left; not what the kernel does in
    /// threads of its own, as writing back.
    pub cpu_seconds: f64,
    /// What the store's counters grew by; names that end in `_max` are maxima since the open.
    pub counters: Numbers,
    /// The store's levels at the end.
    pub levels: Numbers,
    /// Every whole second in which all threads were at work, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_series: Option<Vec<SecondReport>>,
    /// The same after background work came to rest, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled: Option<Settled>,
}

/// What a writing workload cost once background work has come to rest and the file system has written
/// back what was dirty.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Settled {
    /// Whether it came to rest; `false` if the wait was given up.
    pub complete: bool,
    /// How long that took after the end of the workload, in seconds.
    pub seconds: f64,
    /// As [`Report::device_bytes_written`].
    pub device_bytes_written: Option<u64>,
    /// As [`Report::write_amplification`].
    pub write_amplification: Option<f64>,
    /// As [`Report::process_bytes_written`].
    pub process_bytes_written: Option<u64>,
    /// As [`Report::disk_bytes_written`]; complete now, but for files deleted before they were written
    /// back, which never reach the device.
    pub disk_bytes_written: Option<u64>,
    /// As [`Report::cpu_seconds`].
    pub cpu_seconds: f64,
    /// As [`Report::space_bytes`].
    pub space_bytes: u64,
}

/// Device bytes a user byte, `None` if nothing was put or counted.
pub(crate) fn amplification(device_bytes: Option<u64>, user_bytes: u64) -> Option<f64> {
    let device_bytes = device_bytes?;
    (user_bytes > 0).then(|| device_bytes as f64 / user_bytes as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_documented_names_in_order() {
        let report = Report {
            workload: "readseq".into(),
            engine: "lightkv".into(),
            durability: "process_crash".into(),
            threads: 1,
            rate_ops_per_second: None,
            ops: 1,
            seconds: 0.5,
            ops_per_second: 2.0,
            slowest_second_ops_per_second: None,
            read_us: None,
            write_us: None,
            scan_us: None,
            read_modify_write_us: None,
            user_bytes_written: 0,
            device_bytes_written: Some(0),
            write_amplification: None,
            process_bytes_written: None,
            disk_bytes_written: None,
            disk_reads: Some(5),
            disk_bytes_read: Some(20_480),
            disk_read_seconds: Some(0.001),
            space_bytes: 0,
            memory_peak_bytes: 0,
            cpu_seconds: 0.0,
            counters: [("puts", 1)].into_iter().collect(),
            levels: [("tables", 1)].into_iter().collect(),
            time_series: None,
            settled: None,
        };
        let line = serde_json::to_string(&report).unwrap();
        let mut rest = line.as_str();
        for name in [
            "workload",
            "engine",
            "durability",
            "threads",
            "rate_ops_per_second",
            "ops",
            "seconds",
            "ops_per_second",
            "slowest_second_ops_per_second",
            "read_us",
            "write_us",
            "scan_us",
            "read_modify_write_us",
            "user_bytes_written",
            "device_bytes_written",
            "write_amplification",
            "process_bytes_written",
            "disk_bytes_written",
            "disk_reads",
            "disk_bytes_read",
            "disk_read_seconds",
            "space_bytes",
            "memory_peak_bytes",
            "cpu_seconds",
            "counters",
            "puts",
            "levels",
            "tables",
        ] {
            let place = rest
                .find(&format!("\"{name}\":"))
                .unwrap_or_else(|| panic!("{name}"));
            rest = &rest[place..];
        }
        assert!(line.contains("\"read_us\":null") && !line.contains("settled"));
        assert!(!line.contains("time_series"));
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Report>(&line).unwrap(), report);
    }

    #[test]
    fn amplification_needs_user_bytes() {
        assert_eq!(amplification(Some(10), 0), None);
        assert_eq!(amplification(None, 10), None);
        assert_eq!(amplification(Some(15), 10), Some(1.5));
    }
}
