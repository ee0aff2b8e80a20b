//! A short run of every target, without coverage and the same each time. A failure names the input: what
//! `lightkv-fuzz replay` takes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use lightkv_fuzz::{Allocations, CountingAllocator, Mutator, TARGETS, find};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Executions of a target of the lowest weight; the fast ones get more.
const EXECUTIONS_MIN: u64 = 500;

fn run(name: &str, seed: u64) {
    let target = find(name).expect("a target of that name");
    let seeds = (target.seeds)();
    assert!(!seeds.is_empty(), "{name} has no seeds");
    for seed in &seeds {
        assert!(
            seed.len() <= target.len_max_bytes,
            "{name}: a seed is too long"
        );
        target.check(seed);
    }
    let mut mutator = Mutator::new(seeds, target.len_max_bytes, seed);
    for execution in 0..EXECUTIONS_MIN * u64::from(target.weight.min(20)) {
        let input = mutator.input();
        let outcome = catch_unwind(AssertUnwindSafe(|| target.check(&input)));
        if outcome.is_err() {
            let path = std::env::temp_dir().join(format!("lightkv-fuzz-{name}-{execution}"));
            std::fs::write(&path, &input).expect("the input is kept");
            panic!(
                "{name}, seed {seed}, execution {execution}: input \"{}\"\n\
                 again with: cargo run --release -p lightkv-fuzz -- replay {name} {}",
                input.escape_ascii(),
                path.display()
            );
        }
    }
}

macro_rules! short_runs {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                run(stringify!($name), 1);
            }
        )*

        #[test]
        fn every_target_has_a_short_run() {
            let names = [$(stringify!($name)),*];
            let listed: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names[..], listed[..]);
        }
    };
}

short_runs! {
    block stored_block footer properties offsets leaf table_file journal_file journal_index pool_header
    allocation_table pool journal_entry run_of_records pool_image value_file manifest_snapshot
    manifest_edits manifest_file hikv_root hikv_item hikv_redo hikv_log hikv_entry_file hikv_store import_tsv
    import_csv import_jsonl
}

#[test]
fn memory_that_is_asked_for_is_counted() {
    let allocations = Allocations::begin();
    let memory = vec![0_u8; 10 << 20];
    drop(memory);
    assert!(allocations.peak_bytes() >= 10 << 20);
    let mut target = *find("properties").expect("a target of that name");
    target.run = |_| drop(vec![0_u8; 10 << 20]);
    assert!(catch_unwind(|| target.check(b"short")).is_err());
}

#[test]
fn inputs_are_the_same_each_time_and_not_too_long() {
    let mut inputs = Vec::new();
    for _ in 0..2 {
        let mut mutator = Mutator::new(vec![vec![5; 90], vec![]], 100, 7);
        let some: Vec<Vec<u8>> = (0..200).map(|_| mutator.input()).collect();
        assert!(some.iter().all(|input| input.len() <= 100));
        inputs.push(some);
    }
    assert_eq!(inputs[0], inputs[1]);
    assert_ne!(inputs[0][0], inputs[0][1]);
}
