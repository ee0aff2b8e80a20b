use std::collections::BTreeSet;

use lightkv::{Db, EngineKind};

use super::*;
use crate::fake_target::{Call, FakeTarget};
use crate::keys::{key, missing_key};
use crate::{LatencySummary, LightKvTarget, Wrong};

const RECORDS: u64 = 2_000;

fn settings() -> Settings {
    Settings {
        records: RECORDS,
        ..Settings::default()
    }
}

fn open() -> (tempfile::TempDir, Db, LightKvTarget) {
    let directory = tempfile::tempdir().unwrap();
    let db = Db::open(directory.path()).unwrap();
    let target = LightKvTarget::new(db.clone(), EngineKind::LightKv, directory.path(), false);
    (directory, db, target)
}

fn run(bench: &mut Bench<'_>, workload: Workload) -> Report {
    bench.run(workload, &AtomicU64::new(0)).unwrap()
}

fn wrong(bench: &mut Bench<'_>, workload: Workload) -> Wrong {
    match bench.run(workload, &AtomicU64::new(0)).unwrap_err() {
        BenchError::WrongAnswer { wrong, .. } => wrong,
        error => panic!("{error}"),
    }
}

fn count(summary: Option<LatencySummary>) -> u64 {
    summary.map_or(0, |summary| summary.count)
}

/// The records that were put, in the order of the puts, and so on.
fn puts(calls: &[Call]) -> Vec<u64> {
    let of = |call: &Call| match call {
        Call::Put(number) => *number,
        _ => None,
    };
    calls.iter().filter_map(of).collect()
}

fn gets(calls: &[Call]) -> Vec<u64> {
    let of = |call: &Call| match call {
        Call::Get(number) => *number,
        _ => None,
    };
    calls.iter().filter_map(of).collect()
}

fn deletes(calls: &[Call]) -> Vec<u64> {
    let of = |call: &Call| match call {
        Call::Delete(number) => *number,
        _ => None,
    };
    calls.iter().filter_map(of).collect()
}

fn scans(calls: &[Call]) -> Vec<(u64, u64)> {
    let of = |call: &Call| match call {
        Call::Scan(first, limit) => Some(((*first)?, *limit)),
        _ => None,
    };
    calls.iter().filter_map(of).collect()
}

#[test]
fn shares_cover_everything_once() {
    for (operations, threads) in [(10, 3), (2, 4), (1_000_003, 7), (0, 2)] {
        let mut next = 0;
        for thread in 0..threads {
            let share = share(operations, thread, threads);
            assert_eq!(share.start, next);
            next = share.end;
        }
        assert_eq!(next, operations);
    }
}

#[test]
fn every_workload_runs_on_a_store_and_reports() {
    let (_directory, db, target) = open();
    for distribution in Distribution::ALL {
        let settings = Settings {
            distribution,
            threads: 2,
            settle: true,
            ..settings()
        };
        let mut bench = Bench::new(&target, settings.clone()).unwrap();
        for workload in Workload::ALL {
            let report = run(&mut bench, workload);
            if workload.with_writer() {
                assert!(Some(report.ops) > settings.operations(workload));
            } else if workload == Workload::ReadSeq {
                assert_eq!(report.ops, RECORDS);
            } else {
                assert_eq!(
                    Some(report.ops),
                    settings.operations(workload),
                    "{workload}"
                );
            }
            let writes = workload.access() != Access::ReadOnly;
            assert!(report.ops_per_second > 0.0 && report.seconds > 0.0);
            assert_eq!(report.write_us.is_some(), writes, "{workload}");
            assert_eq!(report.settled.is_some(), writes);
            assert_eq!(report.user_bytes_written > 0, writes);
            let kinds = [report.read_us, report.write_us, report.scan_us];
            let pairs = count(report.read_modify_write_us);
            // The two parts of a pair are counted as such too.
            let counted: u64 = kinds.map(count).iter().sum::<u64>() + pairs - 2 * pairs;
            assert_eq!(counted, report.ops, "{workload}");
            if workload.fills() {
                assert_eq!(report.counters.get("puts"), Some(RECORDS), "{workload}");
                assert_eq!(report.user_bytes_written, RECORDS * 116);
            }
        }
        assert_eq!(db.scan(..).count() as u64, bench.keys.count() - RECORDS);
    }
}

#[test]
fn settings_change_between_workloads_but_not_the_content() {
    let target = FakeTarget::default();
    let mut bench = Bench::new(&target, settings()).unwrap();
    run(&mut bench, Workload::FillRandom);
    let mut latest = Settings {
        reads: Some(10),
        distribution: Distribution::Latest,
        ..settings()
    };
    bench.adjust(latest.clone()).unwrap();
    target.take_calls();
    assert_eq!(run(&mut bench, Workload::ReadRandom).ops, 10);
    let newest = gets(&target.take_calls()).into_iter().max();
    assert!(newest > Some(RECORDS - 20), "{newest:?}");
    latest.value_len_bytes += 1;
    assert!(bench.adjust(latest).is_err());
}

#[test]
fn fills_put_every_record_once_in_the_right_order() {
    let target = FakeTarget::default();
    let mut bench = Bench::new(&target, settings()).unwrap();
    run(&mut bench, Workload::FillSeq);
    let calls = target.take_calls();
    assert_eq!(calls.first(), Some(&Call::Begin(Access::WriteOnly)));
    assert_eq!(calls.last(), Some(&Call::End(Access::WriteOnly)));
    assert_eq!(puts(&calls), (0..RECORDS).collect::<Vec<_>>());

    let [first, second] = [(), ()].map(|()| {
        run(&mut bench, Workload::FillRandom);
        puts(&target.take_calls())
    });
    for order in [&first, &second] {
        assert_eq!(order.len() as u64, RECORDS);
        assert_eq!(order.iter().collect::<BTreeSet<_>>().len() as u64, RECORDS);
        let rising = order.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!(
            (900..1_100).contains(&rising),
            "{rising} of 1,999 steps rise"
        );
    }
    assert_ne!(first, second, "each fill has an order of its own");

    let same = |seed| {
        let target = FakeTarget::default();
        let settings = Settings { seed, ..settings() };
        run(
            &mut Bench::new(&target, settings).unwrap(),
            Workload::FillRandom,
        );
        puts(&target.take_calls())
    };
    assert_eq!(same(5), same(5));
    assert_ne!(same(5), same(6));
}

#[test]
fn threads_share_what_is_to_be_done() {
    let target = FakeTarget::default();
    let settings = Settings {
        threads: 3,
        ..settings()
    };
    let mut bench = Bench::new(&target, settings).unwrap();
    for (workload, numbers) in [
        (Workload::FillSeq, puts as fn(&[Call]) -> Vec<u64>),
        (Workload::FillRandom, puts),
        (Workload::DeleteRandom, deletes),
    ] {
        run(&mut bench, workload);
        let mut numbers = numbers(&target.take_calls());
        numbers.sort_unstable();
        assert_eq!(numbers, (0..RECORDS).collect::<Vec<_>>(), "{workload}");
    }
    run(&mut bench, Workload::FillSeq);
    target.take_calls();
    assert_eq!(run(&mut bench, Workload::ReadSeq).ops, RECORDS);
    let mut parts = scans(&target.take_calls());
    parts.sort_unstable();
    assert_eq!(parts, [(0, 666), (666, 667), (1_333, 667)]);
}

#[test]
fn different_workloads_draw_different_records() {
    let target = FakeTarget::default();
    let mut bench = Bench::new(&target, settings()).unwrap();
    run(&mut bench, Workload::FillSeq);
    target.take_calls();
    let mut sequences = Vec::new();
    for workload in [
        Workload::ReadRandom,
        Workload::ReadRandom,
        Workload::Overwrite,
        Workload::ReadMissing,
        Workload::YcsbC,
        Workload::ReadModifyWrite,
    ] {
        run(&mut bench, workload);
        let calls = target.take_calls();
        sequences.push(if workload == Workload::Overwrite {
            puts(&calls)
        } else {
            gets(&calls)
        });
    }
    // Those of missing keys have no numbers.
    assert!(sequences.remove(3).is_empty());
    for (place, sequence) in sequences.iter().enumerate() {
        assert_eq!(sequence.len() as u64, RECORDS);
        for other in &sequences[..place] {
            let same = sequence.iter().zip(other).filter(|(a, b)| a == b).count();
            assert!(same < 100, "{same} of 2,000 draws are the same");
        }
    }
}

#[test]
fn ranges_have_their_lengths() {
    let target = FakeTarget::default();
    let settings = Settings {
        reads: Some(RECORDS),
        ..settings()
    };
    let mut bench = Bench::new(&target, settings).unwrap();
    run(&mut bench, Workload::FillSeq);
    for (workload, shortest, longest) in [
        (Workload::Range10, 10, 10),
        (Workload::Range100, 100, 100),
        (Workload::YcsbE, 1, 100),
    ] {
        target.take_calls();
        let report = run(&mut bench, workload);
        let lens: Vec<_> = scans(&target.take_calls())
            .iter()
            .map(|(_, limit)| *limit)
            .collect();
        assert_eq!(count(report.scan_us), lens.len() as u64);
        assert_eq!(lens.iter().min(), Some(&shortest), "{workload}");
        assert_eq!(lens.iter().max(), Some(&longest), "{workload}");
    }
    run(&mut bench, Workload::FillSeq);
    target.take_calls();
    let report = run(&mut bench, Workload::MixGraph);
    let lens = scans(&target.take_calls());
    assert!(
        (30..95).contains(&lens.len()),
        "3 % of 2,000: {}",
        lens.len()
    );
    let parts = [report.read_us, report.write_us, report.scan_us].map(count);
    assert!((1_580..1_740).contains(&parts[0]) && (220..340).contains(&parts[1]));
}

/// YCSB D: what is read is new, what is inserted extends the records, and later workloads know it.
#[test]
fn inserts_extend_the_records() {
    let target = FakeTarget::default();
    let settings = Settings {
        reads: Some(10_000),
        ..settings()
    };
    let mut bench = Bench::new(&target, settings).unwrap();
    run(&mut bench, Workload::FillRandom);
    target.take_calls();
    let report = run(&mut bench, Workload::YcsbD);
    let calls = target.take_calls();
    let inserted = puts(&calls);
    assert!((400..600).contains(&inserted.len()), "{}", inserted.len());
    let expected: Vec<_> = (RECORDS..).take(inserted.len()).collect();
    assert_eq!(inserted, expected);
    assert_eq!(count(report.write_us), inserted.len() as u64);
    let records = RECORDS + inserted.len() as u64;
    assert_eq!(bench.keys.count(), records);

    let read = gets(&calls);
    let new = read.iter().filter(|number| **number >= RECORDS).count();
    assert!(
        new > read.len() / 2,
        "{new} of {} reads are of inserted records",
        read.len()
    );

    assert_eq!(run(&mut bench, Workload::ReadSeq).ops, records);
    run(&mut bench, Workload::FillSeq);
    assert_eq!(run(&mut bench, Workload::ReadSeq).ops, records);
    // A record that was inserted and got lost is missed.
    target.delete(&key(records - 1)).unwrap();
    assert_eq!(wrong(&mut bench, Workload::ReadSeq), Wrong::Missing);
}

#[test]
fn inserts_and_scans_of_many_threads_are_checked() {
    let (_directory, _db, target) = open();
    let settings = Settings {
        threads: 4,
        reads: Some(10_000),
        ..settings()
    };
    let mut bench = Bench::new(&target, settings).unwrap();
    for workload in [
        Workload::FillRandom,
        Workload::YcsbE,
        Workload::YcsbD,
        Workload::DeleteRandom,
        Workload::YcsbE,
        Workload::YcsbA,
        Workload::ReadSeq,
        Workload::MixGraph,
        Workload::ReadSeq,
    ] {
        run(&mut bench, workload);
    }
}

#[test]
fn batches_have_every_record_once() {
    let target = FakeTarget::default();
    let settings = Settings {
        records: 1_250,
        threads: 3,
        ..settings()
    };
    let mut bench = Bench::new(&target, settings).unwrap();
    for _ in 0..2 {
        let report = run(&mut bench, Workload::FillBatch);
        assert_eq!((report.ops, count(report.write_us)), (13, 13));
        assert_eq!(report.user_bytes_written, 1_250 * 116);
        let put: BTreeSet<_> = puts(&target.take_calls()).into_iter().collect();
        assert_eq!(put, (0..1_250).collect());
    }
    assert_eq!(run(&mut bench, Workload::ReadSeq).ops, 1_250);
    // What the first one wrote is gone.
    let mut value = Vec::new();
    bench.values.fill(77, 0, &mut value);
    target.insert(&key(77), &value);
    let wrong = wrong(&mut bench, Workload::ReadSeq);
    assert!(matches!(wrong, Wrong::Stale { .. }), "{wrong}");
}

#[test]
fn the_second_half_of_the_records_is_new_and_lies_among_the_first() {
    let target = FakeTarget::default();
    let settings = Settings {
        records: 2_001,
        threads: 2,
        ..settings()
    };
    let mut bench = Bench::new(&target, settings).unwrap();
    let mut halves = Vec::new();
    for (workload, ops, present) in [
        (Workload::FillHalf, 1_001, 1_001),
        (Workload::InsertRandom, 1_000, 2_001),
    ] {
        let report = run(&mut bench, workload);
        assert_eq!((report.ops, count(report.write_us)), (ops, ops));
        halves.push(puts(&target.take_calls()));
        assert_eq!(run(&mut bench, Workload::ReadSeq).ops, present);
        // Of records that it does not know it demands nothing.
        run(&mut bench, Workload::ReadRandom);
        target.take_calls();
    }
    let all: BTreeSet<_> = halves.iter().flatten().copied().collect();
    assert_eq!(all, (0..2_001).collect());
    for half in &halves {
        assert!(!half.is_sorted());
        let below_middle = half.iter().filter(|number| **number < 1_000).count();
        assert!((400..600).contains(&below_middle), "{below_middle}");
    }
    // Now it knows all of them.
    target.delete(&key(halves[1][0])).unwrap();
    let wrong = wrong(&mut bench, Workload::ReadSeq);
    assert!(
        matches!(wrong, Wrong::Missing | Wrong::Order { .. }),
        "{wrong}"
    );
}

#[test]
fn deleted_records_stay_away_until_they_are_written() {
    let target = FakeTarget::default();
    let mut bench = Bench::new(&target, settings()).unwrap();
    run(&mut bench, Workload::FillRandom);
    target.take_calls();
    let report = run(&mut bench, Workload::DeleteRandom);
    assert_eq!(report.user_bytes_written, RECORDS * 16);
    let order = deletes(&target.take_calls());
    assert_eq!(order.iter().collect::<BTreeSet<_>>().len() as u64, RECORDS);
    for workload in [
        Workload::ReadRandom,
        Workload::MultiReadRandom,
        Workload::Range100,
        Workload::ReadMissing,
    ] {
        run(&mut bench, workload);
    }
    assert_eq!(run(&mut bench, Workload::ReadSeq).ops, 0);

    let mut value = Vec::new();
    bench.values.fill(77, 0, &mut value);
    target.insert(&key(77), &value);
    assert!(matches!(
        wrong(&mut bench, Workload::ReadSeq),
        Wrong::Stale { .. } | Wrong::Deleted
    ));
    target.delete(&key(77)).unwrap();

    run(&mut bench, Workload::Overwrite);
    let entries = run(&mut bench, Workload::ReadSeq).ops;
    assert!(
        (1_000..1_500).contains(&entries),
        "{entries}: 63 % are expected"
    );
    run(&mut bench, Workload::FillSeq);
    assert_eq!(run(&mut bench, Workload::ReadSeq).ops, RECORDS);
}

#[test]
fn in_step_there_is_one_write_for_each_read() {
    let (_directory, _db, target) = open();
    let mut bench = Bench::new(
        &target,
        Settings {
            threads: 2,
            ..settings()
        },
    )
    .unwrap();
    run(&mut bench, Workload::FillRandom);
    let progress = AtomicU64::new(0);
    let report = bench
        .run(Workload::ReadWhileWritingInStep, &progress)
        .unwrap();
    let (reads, writes) = (count(report.read_us), count(report.write_us));
    assert_eq!(reads, RECORDS);
    // Each of the two writers may be one ahead or behind when its reader ends.
    assert!(reads.abs_diff(writes) <= 2, "{reads}, {writes}");
    assert_eq!(report.ops, reads + writes);

    let report = run(&mut bench, Workload::ReadWhileWriting);
    assert_eq!(count(report.read_us), RECORDS);
    assert_eq!(report.ops, RECORDS + count(report.write_us));
}

/// A store that pauses once makes one operation slow if each starts after the one before, but all that
/// fell due in the meantime if they start at a rate: each is as late as the store itself saw it end.
#[test]
fn a_pause_counts_for_every_operation_that_was_due() {
    const READS: u64 = 300;
    let pause = Duration::from_millis(200);
    // The report, and when the store began and ended each read.
    let measure = |rate_ops_per_second| {
        let mut target = FakeTarget::default();
        target.pause = Some((RECORDS + 100, pause));
        let settings = Settings {
            reads: Some(READS),
            rate_ops_per_second,
            ..settings()
        };
        let mut bench = Bench::new(&target, settings.clone()).unwrap();
        bench.settings.rate_ops_per_second = None;
        run(&mut bench, Workload::FillSeq);
        bench.settings.rate_ops_per_second = rate_ops_per_second;
        let report = run(&mut bench, Workload::ReadRandom);
        drop(bench);
        (report, target.gets.into_inner().unwrap())
    };
    // Whether what is reported is what the store saw. It cannot be less, but for what rounding and the
    // rate of the clock make of it; more is what the machine paused outside of the store.
    let agrees = |latency: LatencySummary, mut seen_us: Vec<f64>| {
        seen_us.sort_by(f64::total_cmp);
        let mean = seen_us.iter().sum::<f64>() / READS as f64;
        let median = seen_us[READS as usize / 2 - 1];
        let longest = seen_us[READS as usize - 1];
        let pairs = [
            (latency.mean, mean),
            (latency.p50, median),
            (latency.max, longest),
        ];
        for (reported, seen) in pairs {
            assert!(reported >= seen * 0.99 - 1.0, "{latency:?}, seen {pairs:?}");
        }
        pairs
            .iter()
            .all(|(reported, seen)| *reported <= seen * 1.01 + 5_000.0)
    };
    // Whether most reads that were due before the last one ended began then, and not a millisecond later: a pause
    // does not make all that follow late.
    let has_caught_up = |due: &[Instant], gets: &[(Instant, Instant)]| {
        let mut gaps: Vec<Duration> = (1..gets.len())
            .filter(|&index| due[index] < gets[index - 1].1)
            .map(|index| gets[index].0 - gets[index - 1].1)
            .collect();
        gaps.sort();
        gaps.get(gaps.len() / 2)
            .is_none_or(|gap| *gap < Duration::from_micros(500))
    };
    // Measured again where the machine has paused.
    let measure_well =
        |rate_ops_per_second, begin_of: fn(&[(Instant, Instant)], usize) -> Instant| {
            for _ in 0..20 {
                let (report, gets) = measure(rate_ops_per_second);
                assert_eq!((report.ops, gets.len() as u64), (READS, READS));
                assert_eq!(report.rate_ops_per_second, rate_ops_per_second);
                let due: Vec<Instant> = (0..gets.len())
                    .map(|index| begin_of(&gets, index))
                    .collect();
                let seen_us = std::iter::zip(&due, &gets)
                    .map(|(due, (_, end))| {
                        end.saturating_duration_since(*due).as_nanos() as f64 / 1e3
                    })
                    .collect();
                if agrees(report.read_us.unwrap(), seen_us) && has_caught_up(&due, &gets) {
                    return report;
                }
            }
            panic!("not what the store saw, or late for longer than it was, 20 times");
        };

    let closed = measure_well(None, |gets, index| gets[index].0);
    assert!(closed.read_us.unwrap().max >= 200_000.0, "{closed:?}");

    // Reads are due from the first on.
    let open = measure_well(Some(1_000.0), |gets, index| {
        gets[0].0 + Duration::from_millis(1) * index as u32
    });
    assert!(open.seconds >= 0.298, "{} s", open.seconds);
    let latency = open.read_us.unwrap();
    // 200 of the 300 were late, evenly from 200 ms down to nothing.
    assert!(
        latency.max >= 200_000.0 && latency.p99 >= 180_000.0,
        "{latency:?}"
    );
    assert!(
        latency.p50 >= 30_000.0 && latency.mean >= 50_000.0,
        "{latency:?}"
    );
}

#[test]
fn a_duration_ends_workloads_and_seconds_are_reported() {
    let target = FakeTarget::default();
    let settings = Settings {
        duration: Some(Duration::from_millis(2_100)),
        threads: 2,
        rate_ops_per_second: Some(1_000.0),
        time_series: true,
        ..settings()
    };
    let mut bench = Bench::new(&target, settings.clone()).unwrap();
    bench.settings.rate_ops_per_second = None;
    let fill = run(&mut bench, Workload::FillSeq);
    assert_eq!(fill.ops, RECORDS, "a fill ends with its last record");
    // None of its seconds is whole, unless the machine pauses by itself.
    if fill.seconds < 1.0 {
        assert_eq!(fill.slowest_second_ops_per_second, None);
        assert_eq!(fill.time_series, Some(Vec::new()));
    }

    bench.settings.rate_ops_per_second = settings.rate_ops_per_second;
    // A thread that the machine holds up for a tenth of a second has one whole second only: then they are measured again.
    let report = (0..20)
        .map(|_| run(&mut bench, Workload::YcsbA))
        // The threads start a little after the time begins.
        .inspect(|report| assert!(report.seconds > 2.05 && report.ops <= 2_102, "{report:?}"))
        .find(|report| report.time_series.as_ref().unwrap().len() == 2)
        .expect("two whole seconds");
    let series = report.time_series.unwrap();
    let slowest = series.iter().map(|second| second.ops).min().unwrap();
    assert_eq!(report.slowest_second_ops_per_second, Some(slowest as f64));
    // A pause moves operations from one second to the next, but adds none.
    assert!(series.iter().map(|second| second.ops).sum::<u64>() <= report.ops);
    for second in series {
        assert!(second.p99_us <= second.max_us, "{second:?}");
    }

    bench.settings.duration = Some(Duration::from_millis(1));
    bench.settings.rate_ops_per_second = Some(1.0);
    let fill = run(&mut bench, Workload::FillRandom);
    assert!(fill.ops < RECORDS, "out of time");
    bench.settings.rate_ops_per_second = None;
    run(&mut bench, Workload::ReadRandom);
}

#[test]
fn what_a_partial_delete_left_is_known() {
    let target = FakeTarget::default();
    let settings = Settings {
        threads: 2,
        ..settings()
    };
    let mut bench = Bench::new(&target, settings).unwrap();
    run(&mut bench, Workload::FillSeq);
    bench.settings.duration = Some(Duration::from_millis(500));
    bench.settings.rate_ops_per_second = Some(200.0);
    let deleted = run(&mut bench, Workload::DeleteRandom).ops;
    assert!((2..=101).contains(&deleted), "{deleted}");
    (bench.settings.duration, bench.settings.rate_ops_per_second) = (None, None);
    assert_eq!(run(&mut bench, Workload::ReadSeq).ops, RECORDS - deleted);
    run(&mut bench, Workload::ReadRandom);
}

#[test]
fn settings_that_do_not_fit_a_workload_are_refused() {
    let target = FakeTarget::default();
    let refused = Settings {
        records: 0,
        ..settings()
    };
    let result = Bench::new(&target, refused);
    assert!(matches!(result, Err(BenchError::InvalidSetting { .. })));
    let open_loop = Settings {
        rate_ops_per_second: Some(1.0),
        ..settings()
    };
    let mut bench = Bench::new(&target, open_loop).unwrap();
    let result = bench.run(Workload::ReadSeq, &AtomicU64::new(0));
    assert!(matches!(result, Err(BenchError::InvalidSetting { .. })));
    assert!(target.take_calls().is_empty());
}

#[test]
fn a_missing_record_ends_the_run() {
    let (_directory, db, target) = open();
    let settings = Settings {
        reads: Some(100_000),
        ..settings()
    };
    let mut bench = Bench::new(&target, settings).unwrap();
    run(&mut bench, Workload::FillRandom);
    db.delete(key(77)).unwrap();
    for workload in [
        Workload::ReadRandom,
        Workload::MultiReadRandom,
        Workload::ReadSeq,
        Workload::Range100,
        Workload::ReadModifyWrite,
        Workload::YcsbC,
    ] {
        let wrong = wrong(&mut bench, workload);
        assert!(
            matches!(wrong, Wrong::Missing | Wrong::Order { .. }),
            "{workload}: {wrong}"
        );
    }
}

#[test]
fn wrong_stale_and_unexpected_values_end_the_run() {
    let (_directory, db, target) = open();
    let settings = Settings {
        records: 1,
        ..settings()
    };
    let mut bench = Bench::new(&target, settings).unwrap();
    run(&mut bench, Workload::FillSeq);
    let first = db.get(key(0)).unwrap().unwrap();
    run(&mut bench, Workload::FillSeq);
    run(&mut bench, Workload::ReadRandom);

    db.put(key(0), &first).unwrap();
    let stale = wrong(&mut bench, Workload::ReadRandom);
    assert!(matches!(stale, Wrong::Stale { .. }));
    db.put(key(0), vec![0; 100]).unwrap();
    assert_eq!(wrong(&mut bench, Workload::ReadSeq), Wrong::Header);
    db.put(missing_key(0), b"").unwrap();
    assert_eq!(wrong(&mut bench, Workload::ReadMissing), Wrong::Unexpected);
}

#[test]
fn a_store_that_forgets_or_keeps_silent_is_found_out() {
    let mut forgets = FakeTarget::default();
    forgets.forgets = true;
    let mut bench = Bench::new(&forgets, settings()).unwrap();
    run(&mut bench, Workload::FillSeq);
    assert_eq!(wrong(&mut bench, Workload::ReadRandom), Wrong::Missing);

    let mut silent = FakeTarget::default();
    silent.silent = true;
    let mut bench = Bench::new(&silent, settings()).unwrap();
    assert_eq!(wrong(&mut bench, Workload::ReadMissing), Wrong::Unanswered);
}

#[test]
fn an_interrupted_run_ends_early_whatever_it_waits_for() {
    let (_directory, _db, target) = open();
    let settings = Settings {
        duration: Some(Duration::from_secs(600)),
        threads: 2,
        ..settings()
    };
    for (workload, rate) in [
        (Workload::ReadWhileWriting, None),
        (Workload::ReadWhileWritingInStep, None),
        (Workload::ReadRandom, Some(0.01)),
    ] {
        let flag = Arc::new(AtomicBool::new(false));
        let mut bench = Bench::new(&target, self::settings()).unwrap();
        bench.end_when(flag.clone());
        run(&mut bench, Workload::FillRandom);
        let rate_ops_per_second = rate;
        bench
            .adjust(Settings {
                rate_ops_per_second,
                ..settings.clone()
            })
            .unwrap();
        let begin = Instant::now();
        let progress = AtomicU64::new(0);
        let outcome = thread::scope(|scope| {
            let under_way = scope.spawn(|| bench.run(workload, &progress));
            while rate.is_none() && progress.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            flag.store(true, Ordering::Relaxed);
            under_way.join().unwrap()
        });
        assert!(matches!(outcome, Err(BenchError::Interrupted)));
        let next = bench.run(workload, &progress);
        assert!(matches!(next, Err(BenchError::Interrupted)));
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
}
