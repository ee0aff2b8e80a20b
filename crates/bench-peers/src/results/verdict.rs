//! The lines that LightKV is held to, each with what was measured.

use serde::Serialize;

use super::summary::{Figure, Metric, Summary};
use crate::plan::Profile;
use crate::stores::StoreKind;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Line {
    /// What is measured.
    pub(crate) figure: String,
    /// What it shall be.
    pub(crate) target: String,
    /// What it was.
    pub(crate) measured: String,
    /// Whether that is enough; `None` if it was not measured.
    pub(crate) met: Option<bool>,
}

impl Line {
    /// The answer in words.
    pub(crate) fn verdict(&self) -> &'static str {
        match self.met {
            Some(true) => "met",
            Some(false) => "not met",
            None => "not measured",
        }
    }
}

/// A direction and a bound.
#[derive(Clone, Copy, Debug)]
enum Want {
    AtLeast(f64),
    AtMost(f64),
}

/// Who is compared with.
#[derive(Clone, Copy, Debug)]
enum Rival {
    RocksDb,
    BestPeer,
    BestLsmPeer,
}

/// Steps of the point and range workloads with the factor to the best peer.
const BEST_PEER_THROUGHPUT: [(&str, f64); 5] = [
    ("readrandom", 1.1),
    ("readrandom-zipfian", 1.3),
    ("readmissing", 3.0),
    ("range100", 2.0),
    ("readseq", 1.0),
];

/// The workloads of YCSB.
const YCSB: [&str; 6] = ["ycsba", "ycsbb", "ycsbc", "ycsbd", "ycsbe", "ycsbf"];

/// The step with a reader and a writer flat out.
const FLAT_OUT: &str = "readwhilewriting";

/// All lines of a profile.
pub(crate) fn lines(
    summary: &Summary,
    profile: Profile,
    lightkv_budget_bytes: Option<u64>,
) -> Vec<Line> {
    let mut judge = Judge {
        summary,
        ours: profile.ours().name(),
        lines: Vec::new(),
    };
    match profile {
        Profile::Ssd | Profile::Pmem => judge.larger_than_memory(profile, lightkv_budget_bytes),
        Profile::Memory => judge.in_memory(),
        Profile::Tmpfs => judge.in_persistent_memory(),
    }
    judge.lines
}

struct Judge<'a> {
    summary: &'a Summary,
    ours: &'a str,
    lines: Vec<Line>,
}

impl Judge<'_> {
    fn larger_than_memory(&mut self, profile: Profile, budget_bytes: Option<u64>) {
        use Metric::{DeviceAmplification, OpsPerSecond, WriteMax, WriteP999};
        let pmem = profile == Profile::Pmem;
        let fill_factor = if pmem { 6.0 } else { 4.0 };
        self.ratio(
            "throughput",
            "fillrandom",
            OpsPerSecond,
            Want::AtLeast(fill_factor),
            Rival::RocksDb,
        );
        if !pmem {
            self.ratio(
                "throughput",
                "fillrandom",
                OpsPerSecond,
                Want::AtLeast(2.5),
                Rival::BestPeer,
            );
        }
        self.ratio(
            "throughput",
            "fillseq",
            OpsPerSecond,
            Want::AtLeast(1.5),
            Rival::BestLsmPeer,
        );
        let tables = self.tables_amplification("fillseq");
        self.bound(
            "fillseq: write amplification without the journal",
            tables,
            Want::AtMost(1.1),
            "",
        );
        if pmem {
            let own = self.own("fillrandom", DeviceAmplification);
            self.bound(
                "fillrandom: write amplification, whole device, settled",
                own,
                Want::AtMost(2.0),
                "",
            );
        } else {
            self.ratio(
                "write amplification, whole device, settled",
                "fillrandom",
                DeviceAmplification,
                Want::AtMost(0.5),
                Rival::RocksDb,
            );
        }
        for (step, factor) in BEST_PEER_THROUGHPUT {
            self.ratio(
                "throughput",
                step,
                OpsPerSecond,
                Want::AtLeast(factor),
                Rival::BestPeer,
            );
        }
        self.flat_out();
        let share = self.slowest_share("fillrandom");
        self.bound(
            "fillrandom: slowest second, share of the mean",
            share,
            Want::AtLeast(0.5),
            "",
        );
        for step in ["fillrandom", FLAT_OUT] {
            self.ratio(
                "write p99.9",
                step,
                WriteP999,
                Want::AtMost(0.1),
                Rival::RocksDb,
            );
            self.ratio(
                "longest write",
                step,
                WriteMax,
                Want::AtMost(0.1),
                Rival::RocksDb,
            );
            let longest = self.own(step, WriteMax).map(in_milliseconds);
            self.bound(
                &format!("{step}: longest write"),
                longest,
                Want::AtMost(10.0),
                " ms",
            );
        }
        for step in YCSB {
            self.ratio(
                "throughput",
                step,
                OpsPerSecond,
                Want::AtLeast(1.3),
                Rival::BestPeer,
            );
        }
        let peak = budget_bytes.and_then(|bytes| {
            let peaks = self
                .summary
                .parts()
                .iter()
                .filter(|part| part.store == self.ours);
            let peaks = peaks
                .flat_map(|part| &part.steps)
                .map(|step| step.resident_peak_bytes);
            Figure::over([peaks.max()? as f64 / bytes as f64])
        });
        self.bound(
            "peak resident memory, share of the budget",
            peak,
            Want::AtMost(1.1),
            "",
        );
        let open = self.own("open-after-kill", Metric::Seconds);
        self.bound("open after kill -9", open, Want::AtMost(0.3), " s");
    }

    fn flat_out(&mut self) {
        use Metric::{OpsPerSecond, ReadP99, ReadP999};
        let label = "reader and writer flat out";
        self.ratio(
            &format!("{label}: read p99"),
            FLAT_OUT,
            ReadP99,
            Want::AtMost(0.2),
            Rival::RocksDb,
        );
        self.ratio(
            &format!("{label}: read p99.9"),
            FLAT_OUT,
            ReadP999,
            Want::AtMost(0.05),
            Rival::RocksDb,
        );
        self.ratio(
            &format!("{label}: total rate"),
            FLAT_OUT,
            OpsPerSecond,
            Want::AtLeast(1.0),
            Rival::RocksDb,
        );
        let slower = self
            .own(FLAT_OUT, ReadP999)
            .zip(self.own("readrandom", ReadP999));
        let slower = slower.map(|(with, without)| scaled(with, 1.0 / without.median));
        self.bound(
            &format!("{FLAT_OUT}: read p99.9 to that of readrandom"),
            slower,
            Want::AtMost(4.0),
            " x",
        );
    }

    fn in_memory(&mut self) {
        for ours in [StoreKind::Lightkv, StoreKind::LightkvPool] {
            self.ours = ours.name();
            let label = format!("{}: throughput", self.ours);
            for (step, factor) in [("put", 15.0), ("get", 15.0), ("get-flushed", 6.0)] {
                self.ratio(
                    &label,
                    step,
                    Metric::OpsPerSecond,
                    Want::AtLeast(factor),
                    Rival::RocksDb,
                );
            }
            for step in ["put", "get"] {
                let two = self.own(&format!("{step}-two-threads"), Metric::OpsPerSecond);
                let one = self.own(step, Metric::OpsPerSecond);
                let gain = two.zip(one).map(|(two, one)| scaled(two, 1.0 / one.median));
                let label = format!("{step}: {}: two threads to one", self.ours);
                self.bound(&label, gain, Want::AtLeast(1.7), " x");
            }
        }
    }

    fn in_persistent_memory(&mut self) {
        let factors = [
            ("get", 12.0),
            ("put", 6.0),
            ("update", 8.0),
            ("delete", 6.0),
            ("scan10", 4.0),
            ("scan100", 4.0),
        ];
        for (step, factor) in factors {
            self.ratio(
                "throughput",
                step,
                Metric::OpsPerSecond,
                Want::AtLeast(factor),
                Rival::RocksDb,
            );
        }
    }

    fn own(&self, step: &str, metric: Metric) -> Option<Figure> {
        self.summary.figure(self.ours, step, metric)
    }

    /// Bytes in tables for each byte the user wrote, as LightKV counts them.
    fn tables_amplification(&self, step: &str) -> Option<Figure> {
        Figure::over(self.summary.records(self.ours, step).filter_map(|record| {
            let counted = record.reported("/settled/device_bytes_written")?;
            let journal = record.reported("/counters/journal_bytes_written")?;
            Some((counted - journal) / record.user_bytes_written as f64)
        }))
    }

    /// The slowest second as a share of the mean rate.
    fn slowest_share(&self, step: &str) -> Option<Figure> {
        Figure::over(
            self.summary
                .records(self.ours, step)
                .filter_map(|record| Some(record.slowest_second_ops? / record.ops_per_second)),
        )
    }

    fn rival(&self, step: &str, metric: Metric, rival: Rival) -> Option<(&str, Figure)> {
        let stores = self.summary.stores().into_iter();
        let candidates = stores.filter(|store| match rival {
            Rival::RocksDb => *store == StoreKind::Rocksdb.name(),
            Rival::BestLsmPeer => [StoreKind::Rocksdb, StoreKind::Leveldb, StoreKind::Fjall]
                .iter()
                .any(|kind| kind.name() == *store),
            Rival::BestPeer => !StoreKind::of_label(store).is_some_and(StoreKind::is_ours),
        });
        candidates
            .filter_map(|store| Some((store, self.summary.figure(store, step, metric)?)))
            // Only throughputs are compared with the best of several, and there more is better.
            .max_by(|(_, left), (_, right)| left.median.total_cmp(&right.median))
    }

    /// A line on the ratio of medians to a rival.
    fn ratio(&mut self, figure: &str, step: &str, metric: Metric, want: Want, rival: Rival) {
        let whom = match rival {
            Rival::RocksDb => "RocksDB",
            Rival::BestPeer => "the best peer",
            Rival::BestLsmPeer => "the best LSM peer",
        };
        let target = match want {
            Want::AtLeast(factor) => format!("at least {factor} x {whom}"),
            Want::AtMost(factor) => format!("at most {factor} x {whom}"),
        };
        let own = self.own(step, metric);
        let found = self.rival(step, metric, rival);
        let (measured, met) = match (own, found) {
            (Some(own), Some((name, theirs))) => {
                let ratio = own.median / theirs.median;
                let text = format!(
                    "{} x ({} to {} of {name})",
                    number(ratio),
                    number(own.median),
                    number(theirs.median)
                );
                (text, Some(holds(ratio, want)))
            }
            (Some(own), None) => (format!("{}, but {whom} was not", number(own.median)), None),
            (None, _) => ("nothing".to_owned(), None),
        };
        self.lines.push(Line {
            figure: format!("{step}: {figure}"),
            target,
            measured,
            met,
        });
    }

    /// A line on a figure of our own.
    fn bound(&mut self, figure: &str, value: Option<Figure>, want: Want, unit: &str) {
        let target = match want {
            Want::AtLeast(bound) => format!("at least {bound}{unit}"),
            Want::AtMost(bound) => format!("at most {bound}{unit}"),
        };
        let (measured, met) = match value {
            Some(value) => (
                format!("{}{unit}", number(value.median)),
                Some(holds(value.median, want)),
            ),
            None => ("nothing".to_owned(), None),
        };
        self.lines.push(Line {
            figure: figure.to_owned(),
            target,
            measured,
            met,
        });
    }
}

fn holds(value: f64, want: Want) -> bool {
    match want {
        Want::AtLeast(bound) => value >= bound,
        Want::AtMost(bound) => value <= bound,
    }
}

fn in_milliseconds(microseconds: Figure) -> Figure {
    scaled(microseconds, 1e-3)
}

fn scaled(figure: Figure, factor: f64) -> Figure {
    Figure {
        median: figure.median * factor,
        min: figure.min * factor,
        max: figure.max * factor,
        rounds: figure.rounds,
    }
}

/// A number for people, with three significant digits or all before the point.
pub(crate) fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 100.0 {
        grouped(value.round())
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 0.1 || size == 0.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.4}")
    }
}

fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) && !text.ends_with('-') {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::{part, step};
    use super::*;

    #[test]
    fn ratios_are_those_of_medians_to_the_right_rival() {
        let summary = Summary::new(vec![
            part(
                "lightkv",
                1,
                vec![step("fillrandom", 310.0), step("readrandom", 115.0)],
            ),
            part(
                "rocksdb",
                1,
                vec![step("fillrandom", 100.0), step("readrandom", 90.0)],
            ),
            part("lmdb", 1, vec![step("readrandom", 100.0)]),
        ]);
        let lines = lines(&summary, Profile::Ssd, None);
        let find = |figure: &str| lines.iter().find(|line| line.figure == figure).unwrap();
        let fill = find("fillrandom: throughput");
        assert_eq!(fill.target, "at least 4 x RocksDB");
        assert_eq!(
            (fill.measured.as_str(), fill.verdict()),
            ("3.10 x (310 to 100 of rocksdb)", "not met")
        );
        let read = find("readrandom: throughput");
        assert_eq!(
            (read.measured.as_str(), read.met),
            ("1.15 x (115 to 100 of lmdb)", Some(true))
        );
        assert_eq!(find("readseq: throughput").verdict(), "not measured");
        assert_eq!(find("open after kill -9").met, None);
    }

    #[test]
    fn every_profile_has_its_lines_without_any_figures() {
        for profile in [Profile::Ssd, Profile::Pmem, Profile::Memory] {
            let lines = lines(&Summary::new(Vec::new()), profile, None);
            assert!(lines.len() >= 10 && lines.iter().all(|line| line.met.is_none()));
        }
    }

    #[test]
    fn in_memory_both_configurations_are_judged() {
        let summary = Summary::new(vec![
            part(
                "lightkv",
                1,
                vec![step("put", 300.0), step("put-two-threads", 540.0)],
            ),
            part("lightkv-pool", 1, vec![step("put", 80.0)]),
            part("rocksdb", 1, vec![step("put", 20.0)]),
        ]);
        let lines = lines(&summary, Profile::Memory, None);
        let met: Vec<_> = lines
            .iter()
            .filter(|line| line.met.is_some())
            .map(|line| (line.figure.as_str(), line.met == Some(true)))
            .collect();
        assert_eq!(
            met,
            [
                ("put: lightkv: throughput", true),
                ("put: lightkv: two threads to one", true),
                ("put: lightkv-pool: throughput", false),
            ]
        );
    }

    #[test]
    fn numbers_are_readable() {
        let texts = [1_234_567.0, 131.6, 12.34, 1.234, 0.05, 0.0].map(number);
        assert_eq!(
            texts,
            ["1,234,567", "132", "12.3", "1.23", "0.0500", "0.00"]
        );
    }
}
