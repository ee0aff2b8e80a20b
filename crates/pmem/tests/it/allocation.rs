//! The allocator across crashes: no overlap, fresh generations, nothing lost that was fenced.

use std::collections::HashMap;

use lightkv_pmem::{Arena, EmulatedBacking, PmemError, Pool, Run, SourceRequest};

use crate::{Random, on, options};

fn assert_disjoint(runs: &[Run]) {
    let mut sorted = runs.to_vec();
    sorted.sort_by_key(|run| run.offset);
    for pair in sorted.windows(2) {
        assert!(
            pair[0].offset + pair[0].len_bytes <= pair[1].offset,
            "{pair:?}"
        );
    }
}

/// Newest generation that each 256-byte block of the pool ever had.
type Generations = HashMap<u64, u32>;

fn note_fresh(generations: &mut Generations, run: &Run) {
    for block in (run.offset..run.offset + run.len_bytes).step_by(256) {
        let before = generations.insert(block, run.generation);
        assert!(
            before.is_none_or(|before| before < run.generation),
            "{run:?} after {before:?}"
        );
    }
}

#[test]
fn random_allocation_and_freeing_across_many_power_losses() {
    for seed in 0..20 {
        let mut random = Random(seed);
        let mut backing = EmulatedBacking::new();
        let mut generations = Generations::new();
        let mut pool = Pool::create(on(&backing)).unwrap();
        let mut live: Vec<Run> = Vec::new();
        let mut fenced: Vec<Run> = Vec::new();
        for life in 0..12u64 {
            for _ in 0..80 {
                match random.below(10) {
                    0..5 => {
                        let arena = if random.below(2) == 0 {
                            Arena::Segments
                        } else {
                            Arena::Blocks
                        };
                        let units = [1, 1, 1, 2, 5, 9][random.below(6) as usize];
                        if let Some(run) = pool.allocate(arena, units, life as u8).unwrap() {
                            note_fresh(&mut generations, &run);
                            live.push(run);
                        }
                    }
                    5..9 if !live.is_empty() => {
                        let run = live.swap_remove(random.below(live.len() as u64) as usize);
                        pool.free(run);
                        // From here on a power loss may or may not remember it.
                        fenced.retain(|kept| *kept != run);
                    }
                    _ => {
                        pool.fence();
                        fenced.clone_from(&live);
                    }
                }
                assert_disjoint(&live);
            }
            drop(pool);
            backing = if life % 3 == 2 {
                backing.kill_image()
            } else {
                backing.crash_image(random.below(1 << 40))
            };
            pool = Pool::open(on(&backing)).unwrap();
            let mut recovered = pool.runs(Arena::Segments);
            recovered.extend(pool.runs(Arena::Blocks));
            assert_disjoint(&recovered);
            for run in &fenced {
                assert!(
                    recovered.contains(run),
                    "seed {seed}, life {life}: lost {run:?}"
                );
            }
            live = recovered;
            fenced.clone_from(&live);
            let used: u64 = live.iter().map(|run| run.len_bytes).sum();
            let counted =
                pool.arena_bytes_used(Arena::Segments) + pool.arena_bytes_used(Arena::Blocks);
            assert_eq!(used, counted);
        }
    }
}

#[test]
fn one_unit_reused_thousands_of_times_never_repeats_a_generation_across_crashes() {
    let mut backing = EmulatedBacking::new();
    let mut options = on(&backing);
    // One extent with a single unit.
    (options.max_bytes, options.extent_bytes) = (12 << 10, 12 << 10);
    options.block_unit_bytes = 0;
    let mut pool = Pool::create(options.clone()).unwrap();
    let mut newest = 0;
    let mut fences = 0;
    for _ in 0..4 {
        for _ in 0..3000 {
            // Never a fence by the caller: the worst case for what a crash may forget.
            let run = pool.allocate(Arena::Segments, 1, 0).unwrap().unwrap();
            assert!(run.generation > newest);
            newest = run.generation;
            pool.free(run);
        }
        fences += pool.counters().fences;
        drop(pool);
        backing = backing.crash_image_with(&mut lightkv_pmem::DropAll);
        options.source = on(&backing).source;
        pool = Pool::open(options.clone()).unwrap();
    }
    assert!(
        fences < 40,
        "about one fence in a thousand reuses, not {fences}"
    );
}

#[test]
fn a_forgotten_free_does_not_come_back_after_a_younger_run_was_there() {
    let backing = EmulatedBacking::new();
    let pool = Pool::create(on(&backing)).unwrap();
    // Far enough into the later run that its table word lies in another line than the head's.
    let old: Vec<Run> = (0..100)
        .map(|_| pool.allocate(Arena::Blocks, 1, 0).unwrap().unwrap())
        .collect();
    pool.fence();
    std::thread::scope(|scope| {
        // Flushed by a thread that never fences: a power loss may forget it.
        scope.spawn(|| old.iter().for_each(|run| pool.free(*run)));
    });
    let units = pool.arena_capacity(Arena::Blocks) / 256;
    let young = pool
        .allocate(Arena::Blocks, units as u32, 0)
        .unwrap()
        .unwrap();
    assert!(old.iter().all(|run| run.offset >= young.offset));
    pool.fence();
    pool.free(young);
    pool.fence();
    drop(pool);
    let image = backing.crash_image_with(&mut lightkv_pmem::DropAll);
    assert_eq!(Pool::open(on(&image)).unwrap().runs(Arena::Blocks), []);
}

#[test]
fn a_dead_head_stays_dead_when_the_run_over_it_is_freed() {
    let backing = EmulatedBacking::new();
    let pool = Pool::create(on(&backing)).unwrap();
    let old: Vec<Run> = (0..100)
        .map(|_| pool.allocate(Arena::Blocks, 1, 0).unwrap().unwrap())
        .collect();
    pool.fence();
    old.iter().for_each(|run| pool.free(*run));
    let units = pool.arena_capacity(Arena::Blocks) / 256;
    let young = pool
        .allocate(Arena::Blocks, units as u32, 0)
        .unwrap()
        .unwrap();
    drop(pool);
    // Of all that was not fenced only the line with the young head survives; the old heads behind
    // it are back, and nothing but the young run says that they are dead.
    let head_line = (64 << 10) + 4096;
    let mut chooser = |line: u64, count: u64| if line == head_line { count - 1 } else { 0 };
    let backing = backing.crash_image_with(&mut chooser);
    let pool = Pool::open(on(&backing)).unwrap();
    assert_eq!(pool.runs(Arena::Blocks), [young]);
    pool.free(young);
    pool.fence();
    drop(pool);
    let image = backing.crash_image_with(&mut lightkv_pmem::DropAll);
    assert_eq!(Pool::open(on(&image)).unwrap().runs(Arena::Blocks), []);
}

#[test]
fn what_opening_stores_is_durable_before_it_returns() {
    let backing = EmulatedBacking::new();
    let pool = Pool::create(on(&backing)).unwrap();
    pool.allocate(Arena::Segments, 1, 0).unwrap().unwrap();
    drop(pool);
    let backing = backing.crash_image(3);
    let before = backing.durable_image();
    let _pool = Pool::open(on(&backing)).unwrap();
    let after = backing.durable_image();
    assert_ne!(before, after, "the floor was raised");
    assert_eq!(after, backing.image());
}

#[test]
fn the_pool_grows_to_its_limit_and_then_says_so() {
    let pool = Pool::create(on(&EmulatedBacking::new())).unwrap();
    let mut runs = Vec::new();
    while let Some(run) = pool.allocate(Arena::Segments, 1, 3).unwrap() {
        runs.push(run);
    }
    assert_eq!(pool.size_bytes(), 512 << 10);
    assert_eq!(
        pool.arena_bytes_used(Arena::Segments),
        pool.arena_capacity(Arena::Segments)
    );
    assert!(pool.allocate(Arena::Blocks, 1, 0).unwrap().is_none());
    assert!(!pool.reserve(Arena::Segments, 1).unwrap());
    pool.free(runs[5]);
    let again = pool.allocate(Arena::Segments, 1, 4).unwrap().unwrap();
    assert_eq!(again.offset, runs[5].offset);
    assert!(again.generation > runs[5].generation);
    assert_eq!(pool.runs(Arena::Segments).len(), runs.len());
}

#[test]
fn a_run_longer_than_an_extent_gets_an_extent_of_its_own() {
    let pool = Pool::create(on(&EmulatedBacking::new())).unwrap();
    let run = pool.allocate(Arena::Segments, 40, 0).unwrap().unwrap();
    assert_eq!((run.units, run.len_bytes), (40, 40 * 4096));
    assert!(pool.contains(run.offset, run.len_bytes));
    assert_eq!(
        pool.arena_of(run.offset + run.len_bytes - 1),
        Some(Arena::Segments)
    );
    assert!(pool.allocate(Arena::Segments, 1000, 0).unwrap().is_none());
    assert!(
        pool.allocate(Arena::Segments, u32::MAX, 0)
            .unwrap()
            .is_none()
    );
}

#[test]
fn reserving_grows_ahead_of_need() {
    let pool = Pool::create(on(&EmulatedBacking::new())).unwrap();
    assert!(pool.reserve(Arena::Blocks, 300).unwrap());
    let size = pool.size_bytes();
    for _ in 0..300 {
        pool.allocate(Arena::Blocks, 1, 0).unwrap().unwrap();
    }
    assert_eq!(pool.size_bytes(), size);
}

#[test]
fn reserving_within_a_size_leaves_the_rest_to_who_needs_it() {
    let pool = Pool::create(on(&EmulatedBacking::new())).unwrap();
    assert!(pool.reserve(Arena::Segments, 1).unwrap());
    let extent_bytes = pool.size_bytes();
    // One unit more than two extents hold.
    let units =
        2 * pool.arena_capacity(Arena::Segments) / u64::from(pool.unit_bytes(Arena::Segments)) + 1;
    let within = |size_bytes| {
        let is_reserved = pool
            .reserve_within(Arena::Segments, units, size_bytes)
            .unwrap();
        (is_reserved, pool.size_bytes() / extent_bytes)
    };
    assert_eq!(within(extent_bytes), (false, 1));
    assert_eq!(within(extent_bytes + 1), (false, 2));
    assert_eq!(within(2 * extent_bytes), (false, 2));
    for _ in 0..units {
        pool.allocate(Arena::Segments, 1, 0).unwrap().unwrap();
    }
    assert_eq!(pool.size_bytes(), 3 * extent_bytes);
}

#[test]
fn wrong_requests_are_typed_errors() {
    let mut options = options(SourceRequest::Volatile);
    options.block_unit_bytes = 0;
    let pool = Pool::create(options).unwrap();
    let invalid = |result| matches!(result, Err(PmemError::InvalidOptions { .. }));
    assert!(invalid(pool.allocate(Arena::Segments, 0, 0)));
    assert!(invalid(pool.allocate(Arena::Blocks, 1, 0)));
}

#[test]
#[should_panic(expected = "not an allocated run")]
fn freeing_twice_is_a_bug() {
    let pool = Pool::create(on(&EmulatedBacking::new())).unwrap();
    let run = pool.allocate(Arena::Segments, 1, 0).unwrap().unwrap();
    pool.free(run);
    pool.free(run);
}

#[test]
fn many_threads_never_get_the_same_unit() {
    let mut options = options(SourceRequest::Volatile);
    options.max_bytes = 8 << 20;
    let pool = Pool::create(options).unwrap();
    let all: Vec<Run> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let pool = &pool;
                scope.spawn(move || {
                    let mut random = Random(thread);
                    let mut mine = Vec::new();
                    for _ in 0..500 {
                        if random.below(3) == 0 && !mine.is_empty() {
                            pool.free(mine.swap_remove(0));
                        } else {
                            let units = 1 + random.below(3) as u32;
                            mine.extend(pool.allocate(Arena::Blocks, units, 0).unwrap());
                        }
                    }
                    mine
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_disjoint(&all);
    let used: u64 = all.iter().map(|run| run.len_bytes).sum();
    assert_eq!(pool.arena_bytes_used(Arena::Blocks), used);
}
