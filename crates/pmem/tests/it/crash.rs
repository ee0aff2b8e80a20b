//! What crash images keep and lose, and that a trace rebuilds the pool.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use lightkv_pmem::{
    Arena, CrashChooser, EmulatedBacking, EmulatedMedium, Granularity, KeepAll, LineTail,
    PersistenceModel, Pool, PoolImage, Run, SourceRequest, TraceEvent, replay,
};

use crate::{Random, on, options, read};

fn pool_with_run(backing: &EmulatedBacking) -> (Pool, Run) {
    let pool = Pool::create(on(backing)).unwrap();
    let run = pool.allocate(Arena::Segments, 1, 0).unwrap().unwrap();
    pool.fence();
    (pool, run)
}

/// Every state that a power loss can leave in `range`.
fn all_states(backing: &EmulatedBacking, offset: u64, len_bytes: usize) -> BTreeSet<Vec<u8>> {
    let model = backing.model();
    let counts: Vec<u64> = model
        .open_choices()
        .iter()
        .map(|(_, count)| *count)
        .collect();
    let mut states = BTreeSet::new();
    let mut choices = vec![0; counts.len()];
    loop {
        let mut next = choices.iter();
        let mut chooser = |_: u64, _: u64| *next.next().unwrap();
        let image = model.crash_image(&mut chooser);
        let start = offset as usize;
        states.insert(image.bytes[start..start + len_bytes].to_vec());
        let Some(place) = (0..counts.len()).find(|place| choices[*place] + 1 < counts[*place])
        else {
            return states;
        };
        choices[place] += 1;
        choices[..place].fill(0);
    }
}

fn words(values: &[u64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

#[test]
fn fenced_lines_survive_every_power_loss() {
    let backing = EmulatedBacking::new();
    let (pool, run) = pool_with_run(&backing);
    pool.write(run.offset, &[7; 100]);
    pool.persist(run.offset, 100);
    pool.write_nt(run.offset + 1000, &[8; 333]);
    pool.store_u64(run.offset + 2000, 9);
    pool.flush(run.offset + 2000, 8);
    pool.store_u128(run.offset + 2080, 10);
    pool.flush(run.offset + 2080, 16);
    pool.fence();
    for seed in 0..50 {
        let image = backing.crash_image(seed).image();
        let at = |offset: u64, len: usize| &image.bytes[(run.offset + offset) as usize..][..len];
        assert_eq!(at(0, 100), [7; 100]);
        assert_eq!(at(1000, 333), [8; 333]);
        assert_eq!(at(2000, 8), words(&[9]));
        assert_eq!(at(2080, 16), words(&[10, 0]));
    }
    assert_eq!(backing.durable_image(), backing.image());
}

#[test]
fn a_store_without_flush_or_without_fence_is_sometimes_lost_and_sometimes_kept() {
    for step in 0..3 {
        let backing = EmulatedBacking::new();
        let (pool, run) = pool_with_run(&backing);
        match step {
            0 => pool.store_u64(run.offset, 1),
            1 => {
                pool.store_u64(run.offset, 1);
                pool.flush(run.offset, 8);
            }
            _ => pool.write_nt(run.offset, &1u64.to_le_bytes()),
        }
        let seen = all_states(&backing, run.offset, 8);
        assert_eq!(
            seen,
            BTreeSet::from([words(&[0]), words(&[1])]),
            "step {step}"
        );
        let some: BTreeSet<u8> = (0..40)
            .map(|seed| backing.crash_image(seed).image().bytes[run.offset as usize])
            .collect();
        assert_eq!(some.len(), 2, "the seeded images show both outcomes");
    }
}

#[test]
fn a_store_after_the_flush_is_not_covered_by_the_fence() {
    let backing = EmulatedBacking::new();
    let (pool, run) = pool_with_run(&backing);
    pool.store_u64(run.offset, 1);
    pool.flush(run.offset, 8);
    pool.store_u64(run.offset, 2);
    pool.fence();
    let seen = all_states(&backing, run.offset, 8);
    assert_eq!(seen, BTreeSet::from([words(&[1]), words(&[2])]));
}

#[test]
fn atomics_of_a_line_survive_as_a_prefix() {
    let backing = EmulatedBacking::new();
    let (pool, run) = pool_with_run(&backing);
    pool.store_u64(run.offset, 1);
    pool.store_u64(run.offset + 8, 2);
    pool.store_u128(run.offset + 16, 3 | 4 << 64);
    let seen = all_states(&backing, run.offset, 32);
    let expected = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 2, 0, 0], [1, 2, 3, 4]];
    assert_eq!(seen, expected.iter().map(|state| words(state)).collect());
}

#[test]
fn words_of_a_copy_survive_in_any_subset_and_before_what_follows() {
    let backing = EmulatedBacking::new();
    let (pool, run) = pool_with_run(&backing);
    pool.write(run.offset, &words(&[1, 2]));
    pool.store_u64(run.offset + 16, 3);
    let seen = all_states(&backing, run.offset, 24);
    let expected = [[0, 0, 0], [1, 0, 0], [0, 2, 0], [1, 2, 0], [1, 2, 3]];
    assert_eq!(seen, expected.iter().map(|state| words(state)).collect());
}

#[test]
fn streamed_words_wait_for_nobody() {
    let backing = EmulatedBacking::new();
    let (pool, run) = pool_with_run(&backing);
    pool.write_nt(run.offset, &words(&[1, 2]));
    pool.store_u64(run.offset + 16, 3);
    assert_eq!(
        all_states(&backing, run.offset, 24).len(),
        8,
        "every subset of three words"
    );
}

#[test]
fn a_fence_speaks_only_for_its_own_thread() {
    let backing = EmulatedBacking::new();
    let (pool, run) = pool_with_run(&backing);
    pool.write_nt(run.offset, &words(&[1]));
    pool.store_u64(run.offset + 64, 2);
    pool.flush(run.offset + 64, 8);
    std::thread::scope(|scope| {
        scope.spawn(|| pool.fence());
    });
    assert_eq!(all_states(&backing, run.offset, 128).len(), 4);
    pool.fence();
    assert_eq!(all_states(&backing, run.offset, 128).len(), 1);
}

#[test]
fn with_byte_granularity_a_fence_is_enough_and_flushes_are_not_counted() {
    let backing = EmulatedBacking::new();
    let mut medium = EmulatedMedium::new(backing.clone());
    medium.granularity = Granularity::Byte;
    let pool = Pool::create(options(SourceRequest::Emulated(medium))).unwrap();
    let run = pool.allocate(Arena::Segments, 1, 0).unwrap().unwrap();
    pool.write(run.offset, &[5; 64]);
    pool.write_nt(run.offset + 64, &[6; 64]);
    assert!(all_states(&backing, run.offset, 128).len() > 1);
    pool.fence();
    assert_eq!(backing.durable_image(), backing.image());
    pool.flush(run.offset, 64);
    assert_eq!(pool.counters().flushed_lines, 0);
}

#[test]
fn appended_records_survive_whole_beside_torn_neighbours() {
    let backing = EmulatedBacking::new();
    let (pool, run) = pool_with_run(&backing);
    let mut tail = LineTail::default();
    let first = pool.append_record(run.offset, &mut tail, &[1; 32], &[&[2; 13]]);
    assert_eq!(first, 48);
    pool.fence();
    // The second record shares a line with the first, which is durable and must stay so.
    let second = pool.append_record(
        run.offset + first,
        &mut tail,
        &[3; 32],
        &[&[4; 8], &[5; 100]],
    );
    assert_eq!(second, 144);
    for seed in 0..50 {
        let image = backing.crash_image(seed).image();
        let bytes = &image.bytes[run.offset as usize..];
        assert_eq!(bytes[..32], [1; 32]);
        assert_eq!(
            bytes[32..48],
            [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0]
        );
    }
    pool.fence();
    let image = backing.durable_image();
    let bytes = &image.bytes[run.offset as usize + 48..];
    assert_eq!(bytes[..32], [3; 32]);
    assert_eq!(bytes[40..140], [5; 100]);
    let resumed = pool.line_tail(run.offset + first + second);
    pool.append_record(
        run.offset + first + second,
        &mut resumed.clone(),
        &[6; 32],
        &[],
    );
}

#[test]
fn a_killed_process_loses_nothing() {
    let backing = EmulatedBacking::new();
    let (pool, run) = pool_with_run(&backing);
    pool.write(run.offset, b"neither flushed nor fenced");
    drop(pool);
    for image in [backing.kill_image(), backing] {
        let pool = Pool::open(on(&image)).unwrap();
        assert_eq!(read(&pool, run.offset, 26), b"neither flushed nor fenced");
    }
}

#[test]
fn an_untracked_medium_keeps_what_a_kill_keeps() {
    let backing = EmulatedBacking::untracked();
    let (pool, run) = pool_with_run(&backing);
    pool.write_nt(run.offset, &[3; 100]);
    assert!(pool.allocate(Arena::Blocks, 1, 0).unwrap().is_some());
    drop(pool);
    let pool = Pool::open(on(&backing.kill_image())).unwrap();
    assert_eq!(read(&pool, run.offset, 100), [3; 100]);
    let again = Pool::open(on(&backing)).unwrap();
    assert_eq!(again.runs(Arena::Segments), [run]);
}

/// The one for measurements has instructions of its own; they store and count the same, and take as long as the medium is said to.
#[test]
fn an_untracked_medium_does_what_a_tracked_one_does() {
    let run_all = |backing: EmulatedBacking| {
        let mut medium = EmulatedMedium::new(backing);
        (medium.write_latency_ns, medium.fence_latency_ns) = (20_000, 50_000);
        let pool = Pool::create(options(SourceRequest::Emulated(medium))).unwrap();
        let run = pool.allocate(Arena::Segments, 1, 0).unwrap().unwrap();
        pool.fence();
        let before = pool.counters();
        let counts = |pool: &Pool| {
            let now = pool.counters();
            let lines = now.flushed_lines - before.flushed_lines;
            let bytes = now.bytes_written - before.bytes_written;
            (now.fences - before.fences, lines, bytes)
        };
        let timed = |step: &mut dyn FnMut()| {
            let (fences, lines, _) = counts(&pool);
            let begin = Instant::now();
            step();
            let elapsed = begin.elapsed();
            let (fences_now, lines_now, _) = counts(&pool);
            let ns = (lines_now - lines) * 20_000 + (fences_now - fences) * 50_000;
            assert!(ns > 0 && elapsed >= Duration::from_nanos(ns), "{elapsed:?}");
        };
        let (mut end, mut tail) = (run.offset, LineTail::default());
        for len in [0, 13, 100, 1500] {
            let value = vec![2; len];
            timed(&mut || end += pool.append_record(end, &mut tail, &[1; 32], &[&value]));
        }
        let place = end.next_multiple_of(64);
        for len in [8, 64, 100, 600] {
            timed(&mut || pool.write_nt(place, &vec![3; len]));
        }
        pool.store_u64(place, 4);
        pool.store_u128(place + 16, 5);
        timed(&mut || pool.flush(place, 32));
        timed(&mut || pool.fence());
        let len = (place + 600 - run.offset) as usize;
        (counts(&pool), read(&pool, run.offset, len))
    };
    let untracked = run_all(EmulatedBacking::untracked());
    assert_eq!(untracked, run_all(EmulatedBacking::new()));
}

#[test]
fn one_medium_has_one_pool_at_a_time() {
    let backing = EmulatedBacking::new();
    let pool = Pool::create(on(&backing)).unwrap();
    assert!(Pool::open(on(&backing)).is_err());
    pool.close().unwrap();
    Pool::open(on(&backing)).unwrap();
}

/// A random run of everything a pool can do.
fn work(pool: &Pool, random: &mut Random, steps: u32) {
    let mut runs: Vec<Run> = Arena::ALL_FOR_TESTS
        .iter()
        .flat_map(|a| pool.runs(*a))
        .collect();
    for step in 0..steps {
        match random.below(8) {
            0 | 1 => {
                let arena = Arena::ALL_FOR_TESTS[random.below(2) as usize];
                let units = 1 + random.below(4) as u32;
                runs.extend(pool.allocate(arena, units, step as u8).unwrap());
            }
            2 if !runs.is_empty() => {
                let index = random.below(runs.len() as u64) as usize;
                pool.free(runs.swap_remove(index));
            }
            3 => pool.fence(),
            4 => pool.mark(u64::from(step)),
            _ if runs.is_empty() => {}
            kind => {
                let run = runs[random.below(runs.len() as u64) as usize];
                let start = random.below(run.len_bytes - 32);
                let room = run.len_bytes - start;
                let len = (1 + random.below(room.min(300))) as usize;
                let bytes = vec![random.below(256) as u8; len];
                let place = run.offset + start;
                match kind {
                    5 => pool.write(place, &bytes),
                    6 => pool.write_nt(place, &bytes),
                    _ => pool.store_u128(place & !15, random.below(u64::MAX).into()),
                }
                if random.below(2) == 0 {
                    pool.flush(place, len as u64);
                }
            }
        }
    }
}

/// The arenas in the order of the tests.
trait Arenas {
    const ALL_FOR_TESTS: [Arena; 2];
}

impl Arenas for Arena {
    const ALL_FOR_TESTS: [Arena; 2] = [Arena::Segments, Arena::Blocks];
}

#[test]
fn replaying_the_trace_rebuilds_the_pool_byte_for_byte_across_crashes() {
    for seed in 0..10 {
        let mut random = Random(seed);
        let mut backing = EmulatedBacking::new();
        for life in 0..4 {
            let initial = backing.image();
            let mut medium = EmulatedMedium::new(backing.clone());
            medium.recording = true;
            let options = options(SourceRequest::Emulated(medium));
            let pool = match life {
                0 => Pool::create(options).unwrap(),
                _ => Pool::open(options).unwrap(),
            };
            work(&pool, &mut random, 150);
            let trace = backing.take_trace();
            let replayed = replay(&trace, &initial, &mut KeepAll);
            let total = pool.size_bytes() as usize;
            assert!(
                replayed.bytes == read(&pool, 0, total),
                "seed {seed}, life {life}"
            );
            assert_eq!(replayed, backing.image());
            drop(pool);
            // The model that follows the trace and the one that lived through it agree.
            let mut first_lines = FirstLines::default();
            let replayed = replay(&trace, &initial, &mut first_lines);
            assert_eq!(
                replayed,
                backing.crash_image_with(&mut FirstLines::default()).image()
            );
            backing = backing.crash_image(seed * 100 + life);
        }
    }
}

/// Keeps and drops lines by turns.
#[derive(Default)]
struct FirstLines(bool);

impl CrashChooser for FirstLines {
    fn choose(&mut self, _line_offset: u64, choice_count: u64) -> u64 {
        self.0 = !self.0;
        if self.0 { choice_count / 2 } else { 0 }
    }
}

#[test]
fn every_prefix_of_the_creation_of_a_pool_can_be_opened() {
    let backing = EmulatedBacking::new();
    let mut medium = EmulatedMedium::new(backing.clone());
    medium.recording = true;
    let pool = Pool::create(options(SourceRequest::Emulated(medium))).unwrap();
    // A second extent, so that one is also interrupted behind a sound one.
    pool.allocate(Arena::Blocks, 1, 0).unwrap().unwrap();
    pool.fence();
    let trace = backing.take_trace();
    let mut model = PersistenceModel::new(&PoolImage::default());
    let mut opened = 0;
    for record in &trace {
        model.apply(record.thread, &record.event);
        for seed in 0..8 {
            let image = model.crash_image(&mut lightkv_pmem::SeededChooser::new(seed));
            let pool = Pool::open(on(&EmulatedBacking::from_image(image))).unwrap();
            let run = pool.allocate(Arena::Blocks, 3, 1).unwrap().unwrap();
            assert!(pool.contains(run.offset, run.len_bytes));
            opened += 1;
        }
    }
    assert!(opened > 80);
    assert!(
        trace
            .iter()
            .any(|record| matches!(record.event, TraceEvent::Extent { .. }))
    );
}
