use super::super::sampler::Operation;
use super::*;
use crate::engines::hikv::inline_key::InlineKey;
use crate::engines::hikv::ordered_index::OrderedIndex;
use crate::engines::hikv::update_queue::Update;

/// A window with so many samples of gets, scans and writes, and so long latencies.
fn window(numbers: [u64; 3], latencies_ns: [u64; 3], back_end_ns: u64) -> Totals {
    let writes = numbers[Operation::Write as usize];
    Totals {
        samples: numbers,
        sampled_ns: std::array::from_fn(|index| numbers[index] * latencies_ns[index]),
        applied: writes * 64,
        applied_ns: writes * 64 * back_end_ns,
    }
}

/// The paper's figures (section 4.5): 8 of 16 for half writes, 3 of 16 for a twentieth.
#[test]
fn the_number_of_threads_follows_the_equations() {
    let latencies = [200, 2_800, 600];
    // Half gets, half writes: 200 + 600 in front, 800 behind.
    let half = window([100, 0, 100], latencies, 800);
    assert_eq!(back_end_threads(&half, 16), Some(8));
    // 95 gets for 5 writes: 19 * 200 + 600 = 4400 in front.
    let few = window([95, 0, 5], latencies, 1_000);
    assert_eq!(back_end_threads(&few, 16), Some(3));
    // Scans take fourteen times as long as gets.
    let scans = window([0, 95, 5], latencies, 1_000);
    assert_eq!(back_end_threads(&scans, 16), Some(1));
    // Writes only, with a back end as fast as the front.
    let writes = window([0, 0, 100], latencies, 600);
    assert_eq!(back_end_threads(&writes, 16), Some(8));
    assert_eq!(
        back_end_threads(&window([100, 0, 0], latencies, 0), 16),
        None
    );
}

fn queues_into_an_index(queues: usize) -> (Arc<UpdateQueues>, Arc<OrderedIndex>) {
    let index = Arc::new(OrderedIndex::new());
    let target = Arc::clone(&index);
    let queues = UpdateQueues::new(queues, 4096, move |updates| {
        for Update { key, position } in updates {
            target.insert(key, position.expect("nothing is removed here"));
        }
    });
    (Arc::new(queues), index)
}

fn push(queues: &UpdateQueues, number: u64) {
    let update = Update {
        key: InlineKey::from_slice(&number.to_be_bytes()),
        position: Some(number),
    };
    queues
        .push(number.wrapping_mul(0x9e37_79b9_7f4a_7c15), update)
        .unwrap();
}

fn options(threads_total: usize) -> BackEndOptions {
    BackEndOptions {
        threads_total,
        fixed: None,
    }
}

#[test]
fn requests_arrive_without_anybody_asking() {
    let (queues, index) = queues_into_an_index(4);
    let back_end = BackEnd::start(Arc::clone(&queues), Arc::default(), options(3)).unwrap();
    for number in 0..10_000 {
        push(&queues, number);
    }
    while queues.pending() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(index.len(), 10_000);
    back_end.stop().unwrap();
}

#[test]
fn a_stop_brings_everything_into_the_index() {
    let (queues, index) = queues_into_an_index(4);
    let back_end = BackEnd::start(Arc::clone(&queues), Arc::default(), options(2)).unwrap();
    for number in 0..10_000 {
        push(&queues, number);
    }
    back_end.stop().unwrap();
    assert_eq!(index.len(), 10_000);
}

/// An idle store does nothing at all, and the next write wakes it.
#[test]
fn idle_threads_sleep_and_wake() {
    let (queues, index) = queues_into_an_index(4);
    let back_end = BackEnd::start(Arc::clone(&queues), Arc::default(), options(4)).unwrap();
    for round in 1..=3 {
        push(&queues, round);
        while index.len() < round {
            std::thread::yield_now();
        }
        // Asleep is a state, not a time: wait for it.
        while !queues.is_asleep() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The others go to sleep because the conductor sent them there.
        let mut looks = back_end.crew.looks.load(Ordering::SeqCst);
        let mut quiet = 0;
        while quiet < 20 {
            std::thread::sleep(Duration::from_millis(2));
            let now = back_end.crew.looks.load(Ordering::SeqCst);
            quiet = if now == looks { quiet + 1 } else { 0 };
            looks = now;
        }
        assert!(queues.is_asleep(), "nothing was pushed");
    }
    back_end.stop().unwrap();
}

/// A back end with a fixed number of threads has all of them at work.
#[test]
fn a_fixed_number_does_not_adapt() {
    let (queues, index) = queues_into_an_index(4);
    let options = BackEndOptions {
        threads_total: 16,
        fixed: Some(3),
    };
    let sampler = Arc::new(Sampler::default());
    let back_end = BackEnd::start(Arc::clone(&queues), Arc::clone(&sampler), options).unwrap();
    for number in 0..20_000 {
        // Reads that would ask for one thread only.
        drop(sampler.begin(Operation::Get));
        push(&queues, number);
    }
    assert_eq!(back_end.wanted_threads(), 3);
    back_end.stop().unwrap();
    assert_eq!(index.len(), 20_000);
}

/// A panic behind ends the threads, and is told to whoever stops them.
#[test]
fn a_panic_behind_is_reported() {
    let queues = Arc::new(UpdateQueues::new(2, 64, |_| panic!("on purpose")));
    let back_end = BackEnd::start(Arc::clone(&queues), Arc::default(), options(2)).unwrap();
    push(&queues, 1);
    while !queues.has_failed() {
        std::thread::yield_now();
    }
    assert_eq!(queues.drain(), Err(Stopped));
    assert_eq!(back_end.stop(), Err(Stopped));
}
