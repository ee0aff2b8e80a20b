//! Prints what the driver itself costs an operation: run time against a store that does next to nothing.
//!
//! `cargo run --release -p lightkv-bench --example driver_cost [WORKLOAD...]`
//!
//! The store keeps what the first fill put, finds it by the last three digits of its key, and forgets every
//! later put; its records stay in the cache of a core. What is printed is everything but the store: choice
//! of operation and record, making key and value, two time stamps, the histogram, and the check of
//! what was read.

use std::hint::black_box;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use lightkv_bench::{
    Bench, Distribution, DurabilityClass, ReadValue, Settings, Target, TargetError, VisitEntry,
    Workload, clock_cost,
};

const RECORDS: usize = 1_000;

/// A record, once it was put.
type Slot = OnceLock<(Box<[u8]>, Box<[u8]>)>;

struct NullTarget {
    slots: Vec<Slot>,
}

impl NullTarget {
    fn slot(&self, key: &[u8]) -> Option<&Slot> {
        let digits = key
            .last_chunk::<3>()?
            .map(|digit| usize::from(digit - b'0'));
        self.slots.get(digits[0] * 100 + digits[1] * 10 + digits[2])
    }
}

impl Target for NullTarget {
    fn name(&self) -> &str {
        "null"
    }

    fn durability(&self) -> DurabilityClass {
        DurabilityClass::Nothing
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), TargetError> {
        if let Some(slot) = self.slot(black_box(key))
            && slot.get().is_none()
        {
            let _first = slot.set((key.into(), value.into()));
        }
        black_box(value);
        Ok(())
    }

    fn delete(&self, key: &[u8]) -> Result<(), TargetError> {
        black_box(key);
        Ok(())
    }

    fn get(&self, key: &[u8], read: &mut ReadValue<'_>) -> Result<(), TargetError> {
        // Keys of no record end in a byte after the digits.
        let is_record = key.last().is_some_and(u8::is_ascii_digit);
        let record = self.slot(key).filter(|_| is_record);
        let record = record.and_then(OnceLock::get);
        read(record.map(|(_, value)| &**value));
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        limit: u64,
        visit: &mut VisitEntry<'_>,
    ) -> Result<u64, TargetError> {
        let first = self
            .slots
            .partition_point(|slot| slot.get().is_some_and(|(key, _)| **key < *from));
        let mut visited = 0;
        for (key, value) in self.slots[first..].iter().filter_map(OnceLock::get) {
            if visited == limit {
                break;
            }
            visited += 1;
            if !visit(key, value) {
                break;
            }
        }
        Ok(visited)
    }

    fn space_bytes(&self) -> u64 {
        0
    }
}

/// Cost of the two indirect calls of a get: of the store, and of what receives the value.
fn call_ns() -> Result<f64, TargetError> {
    const CALLS: u32 = 20_000_000;
    let null = NullTarget { slots: Vec::new() };
    let target: &dyn Target = black_box(&null);
    let mut answers = 0_u32;
    let begin = Instant::now();
    for _ in 0..CALLS {
        let mut read = |value: Option<&[u8]>| answers += u32::from(value.is_none());
        target.get(black_box(b"000"), &mut read)?;
    }
    assert_eq!(answers, CALLS);
    Ok(begin.elapsed().as_nanos() as f64 / f64::from(CALLS))
}

fn main() -> Result<(), TargetError> {
    let cost = clock_cost();
    println!(
        "clock and histogram: {:.1} ns; clock: {}",
        cost.operation_ns, cost.source
    );
    println!(
        "{:<18} {:>7} {:>12} {:>14}",
        "workload", "value B", "ns/operation", "with seconds"
    );
    println!(
        "get by reference to a trait, with its answer: {:.1} ns",
        call_ns()?
    );
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    for value_len_bytes in [200, 1_024] {
        for (workload, distribution) in [
            (Workload::Overwrite, Distribution::Uniform),
            (Workload::ReadMissing, Distribution::Uniform),
            (Workload::ReadRandom, Distribution::Uniform),
            (Workload::ReadRandom, Distribution::Zipfian),
            (Workload::YcsbA, Distribution::Zipfian),
            (Workload::MixGraph, Distribution::Uniform),
            (Workload::Range100, Distribution::Uniform),
        ] {
            if !chosen.is_empty() && !chosen.iter().any(|name| name == workload.name()) {
                continue;
            }
            let mut costs = Vec::new();
            for time_series in [false, true] {
                let target = NullTarget {
                    slots: (0..RECORDS).map(|_| Slot::new()).collect(),
                };
                let settings = Settings {
                    records: RECORDS as u64,
                    duration: Some(Duration::from_millis(400)),
                    value_len_bytes,
                    distribution,
                    time_series,
                    ..Settings::default()
                };
                let mut bench = Bench::new(&target, settings)?;
                bench.run(Workload::FillSeq, &AtomicU64::new(0))?;
                let report = bench.run(workload, &AtomicU64::new(0))?;
                costs.push(report.seconds * 1e9 / report.ops as f64);
            }
            let name = format!(
                "{} {}",
                workload.name(),
                match distribution {
                    Distribution::Zipfian => "(z)",
                    _ => "",
                }
            );
            println!(
                "{name:<18} {value_len_bytes:>7} {:>12.1} {:>14.1}",
                costs[0], costs[1]
            );
        }
    }
    Ok(())
}
