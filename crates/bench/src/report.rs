//! What a workload reports: one line of JSON each.

use lightkv::{Counters, Durability, Levels, Survives};
use serde::{Serialize, Serializer};

use crate::latency::LatencySummary;

/// Figures of one workload. Serialised by serde it has exactly these names.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Name of the workload.
    pub workload: &'static str,
    /// Name of the engine.
    pub engine: &'static str,
    /// What the writes of this run survive: [`durability_name`]. Figures of different classes must not
    /// be compared.
    pub durability: &'static str,
    /// Operations: puts, gets, scans (`range100`) or entries (`readseq`). Those of the writer of
    /// `readwhilewriting` are not among them; they are `counters.puts`.
    pub ops: u64,
    /// From the start of the threads to the end of the last, in seconds; without settling.
    pub seconds: f64,
    /// `ops` / `seconds`.
    pub ops_per_second: f64,
    /// Latency of gets, in microseconds.
    pub read_us: Option<LatencySummary>,
    /// Latency of puts, in microseconds.
    pub write_us: Option<LatencySummary>,
    /// Latency of whole scans (`range100`) or of single steps (`readseq`), in microseconds.
    pub scan_us: Option<LatencySummary>,
    /// Bytes of keys and values put.
    pub user_bytes_written: u64,
    /// Bytes written to the journal and to tables and value files until the end of the workload, those
    /// of background work that earlier workloads left included. Pool bytes are not: see the counter.
    pub device_bytes_written: u64,
    /// `device_bytes_written` / `user_bytes_written`; `None` if nothing was put.
    pub write_amplification: Option<f64>,
    /// Bytes of the store's files at the end.
    pub space_bytes: u64,
    /// Peak resident memory of the process during the workload, in bytes, mapped files included.
    pub memory_peak_bytes: u64,
    /// What the counters grew by; `stall_us_max` is the longest stall since the store was opened.
    #[serde(serialize_with = "serialize_counters")]
    pub counters: Counters,
    /// Levels at the end.
    #[serde(serialize_with = "serialize_levels")]
    pub levels: Levels,
    /// The same after background work came to rest, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settled: Option<Settled>,
}

/// What a writing workload cost once background work has come to rest.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Settled {
    /// Whether it came to rest; `false` if the wait was given up.
    pub complete: bool,
    /// How long that took after the end of the workload, in seconds.
    pub seconds: f64,
    /// As [`Report::device_bytes_written`].
    pub device_bytes_written: u64,
    /// As [`Report::write_amplification`].
    pub write_amplification: Option<f64>,
    /// As [`Report::space_bytes`].
    pub space_bytes: u64,
}

/// The class that the writes of a run belong to: `"process_crash"` or `"power_loss"`.
pub fn durability_name(durability: &Durability, sync: bool) -> &'static str {
    let survives = match durability.synced {
        Some(synced) if sync => synced,
        _ => durability.acknowledged,
    };
    match survives {
        Survives::ProcessCrash => "process_crash",
        Survives::PowerLoss => "power_loss",
    }
}

/// Bytes that reached a device, as [`Report::device_bytes_written`] defines them.
pub(crate) fn device_bytes(counters: &Counters) -> u64 {
    counters.journal_bytes_written + counters.table_bytes_written
}

/// Device bytes a user byte, `None` if nothing was put.
pub(crate) fn amplification(device_bytes: u64, user_bytes: u64) -> Option<f64> {
    (user_bytes > 0).then(|| device_bytes as f64 / user_bytes as f64)
}

fn serialize_counters<S: Serializer>(value: &Counters, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(value.iter())
}

fn serialize_levels<S: Serializer>(value: &Levels, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(value.iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_documented_names_in_order() {
        let report = Report {
            workload: "readseq",
            engine: "lightkv",
            durability: "process_crash",
            ops: 1,
            seconds: 0.5,
            ops_per_second: 2.0,
            read_us: None,
            write_us: None,
            scan_us: None,
            user_bytes_written: 0,
            device_bytes_written: 0,
            write_amplification: None,
            space_bytes: 0,
            memory_peak_bytes: 0,
            counters: Counters::default(),
            levels: Levels::default(),
            settled: None,
        };
        let line = serde_json::to_string(&report).unwrap();
        let mut rest = line.as_str();
        for name in [
            "workload",
            "engine",
            "durability",
            "ops",
            "seconds",
            "ops_per_second",
            "read_us",
            "write_us",
            "scan_us",
            "user_bytes_written",
            "device_bytes_written",
            "write_amplification",
            "space_bytes",
            "memory_peak_bytes",
            "counters",
            "puts",
            "gets_hit",
            "stall_us_max",
            "levels",
            "flushed_keys",
            "tables",
        ] {
            let place = rest
                .find(&format!("\"{name}\":"))
                .unwrap_or_else(|| panic!("{name}"));
            rest = &rest[place..];
        }
        assert!(line.contains("\"read_us\":null") && !line.contains("settled"));
        assert!(!line.contains('\n'));
    }

    #[test]
    fn a_sync_counts_only_where_it_is_possible() {
        let mut durability = Durability {
            acknowledged: Survives::ProcessCrash,
            synced: Some(Survives::PowerLoss),
            medium: "journal",
            granularity: None,
        };
        assert_eq!(durability_name(&durability, false), "process_crash");
        assert_eq!(durability_name(&durability, true), "power_loss");
        durability.synced = None;
        assert_eq!(durability_name(&durability, true), "process_crash");
    }

    #[test]
    fn amplification_needs_user_bytes() {
        assert_eq!(amplification(10, 0), None);
        assert_eq!(amplification(15, 10), Some(1.5));
    }
}
