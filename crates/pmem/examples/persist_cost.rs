//! Prints what it costs to append a record to a pool and make it durable, by record size.
//!
//! `cargo run --release -p lightkv-pmem --example persist_cost [DIRECTORY]`
//!
//! The directory names the medium: a DAX mount, a tmpfs such as `/dev/shm`, an ordinary disk. The
//! default is the system's temporary directory. On anything but DAX the instructions are the same
//! but the medium behind them is DRAM, so read the figures as the cost of the instructions.

use std::path::PathBuf;
use std::time::Instant;

use lightkv_pmem::{Arena, LineTail, Pool, PoolOptions, Run, SourceRequest};

const SEGMENT_BYTES: u32 = 32 << 10;
const ROUNDS: usize = 60;
const APPENDS_A_ROUND: usize = 400;

/// A run that is filled from its beginning, again and again.
struct Segment {
    run: Run,
    end: u64,
    tail: LineTail,
}

/// One way to append a record and make it durable.
type Append = fn(&Pool, &mut Segment, &[u8]);

const WAYS: [(&str, Append); 5] = [
    ("append_record", |pool, segment, record| {
        let (header, key, value) = split(record);
        pool.append_record(segment.end, &mut segment.tail, header, &[key, value]);
        pool.fence();
    }),
    ("write_record", |pool, segment, record| {
        let (header, key, value) = split(record);
        pool.write_record(segment.end, header, &[key, value]);
        pool.fence();
    }),
    ("write_nt", |pool, segment, record| {
        pool.write_nt(segment.end, record);
        pool.fence();
    }),
    ("write + persist", |pool, segment, record| {
        pool.write(segment.end, record);
        pool.persist(segment.end, record.len() as u64);
    }),
    ("write, lost", |pool, segment, record| {
        pool.write(segment.end, record)
    }),
];

fn split(record: &[u8]) -> (&[u8; 32], &[u8], &[u8]) {
    let (header, body) = record.split_first_chunk().expect("32 bytes or more");
    let (key, value) = body.split_at(body.len().min(16));
    (header, key, value)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let parent = std::env::args_os()
        .nth(1)
        .map_or_else(std::env::temp_dir, PathBuf::from);
    let directory = tempfile::tempdir_in(parent)?;
    let pool = Pool::create(PoolOptions {
        source: SourceRequest::Directory(directory.path().to_path_buf()),
        identity: 1,
        engine_kind: 1,
        max_bytes: 66 << 20,
        extent_bytes: 66 << 20,
        segment_unit_bytes: SEGMENT_BYTES,
        block_unit_bytes: 0,
        always_flush: false,
        faults: Default::default(),
    })?;
    println!(
        "{:?}, granularity {:?}",
        pool.source_kind(),
        pool.granularity()
    );
    println!("ns an operation: lowest decile of {ROUNDS} rounds, and the median");
    let mut segments = Vec::new();
    while let Some(run) = pool.allocate(Arena::Segments, 1, 0)? {
        segments.push(Segment {
            run,
            end: run.offset,
            tail: LineTail::default(),
        });
    }
    pool.fence();
    for segment_count in [1, 16, segments.len()] {
        println!("\n{segment_count} segments in random turns");
        print!("{:>8}", "bytes");
        WAYS.iter().for_each(|(name, _)| print!("{name:>18}"));
        println!();
        for record_bytes in [40usize, 64, 104, 128, 200, 256, 456, 1000, 1024, 4008] {
            print_costs(&pool, &mut segments[..segment_count], record_bytes);
        }
    }
    println!("\n{:?}", pool.counters());
    pool.close()?;
    Ok(())
}

/// All ways take turns, so that a disturbance meets them alike.
fn print_costs(pool: &Pool, segments: &mut [Segment], record_bytes: usize) {
    let record: Vec<u8> = (0..record_bytes).map(|index| index as u8).collect();
    let mut costs: [Vec<f64>; WAYS.len()] = Default::default();
    let mut random = 1u64;
    for _ in 0..ROUNDS {
        for (cost, (_, append)) in costs.iter_mut().zip(WAYS) {
            // The ways leave different bytes behind the end, so each begins at a line of its own.
            for segment in segments.iter_mut() {
                segment.end = segment.end.next_multiple_of(64);
                segment.tail = LineTail::default();
            }
            let start = Instant::now();
            for _ in 0..APPENDS_A_ROUND {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let segment = &mut segments[(random >> 33) as usize % segments.len()];
                let run = segment.run;
                if segment.end + record.len() as u64 > run.offset + run.len_bytes {
                    segment.end = run.offset;
                    segment.tail = LineTail::default();
                }
                append(pool, segment, &record);
                segment.end += record.len() as u64;
            }
            cost.push(start.elapsed().as_nanos() as f64 / APPENDS_A_ROUND as f64);
        }
    }
    print!("{record_bytes:>8}");
    for cost in &mut costs {
        cost.sort_by(f64::total_cmp);
        print!("{:>10.0} {:>7.0}", cost[ROUNDS / 10], cost[ROUNDS / 2]);
    }
    println!();
}
