//! What the scheduler is asked for by threads that work in the background. All of it are hints: where the system refuses them, everything
//! takes the same steps at other times.

/// Lets the calling thread have less of the processor than others, by its nice value: what wakes it does not give way to it.
pub(crate) fn lower_priority(nice: i32) {
    use rustix::process::{getpriority_process, setpriority_process};
    // Of the calling thread, on Linux. A program that runs at a lower one keeps it.
    let outcome = getpriority_process(None).and_then(|now| match now < nice {
        true => setpriority_process(None, nice),
        false => Ok(()),
    });
    if let Err(error) = outcome {
        tracing::debug!(%error, nice, "cannot lower the priority of a thread");
    }
}

/// Lets the calling thread have as much of the processor as before, but in turns of 30 ms, and later than others that have shorter ones.
///
/// A thread that is woken by its write's end takes the processor from whoever runs where the device interrupts, and keeps it for a millisecond or
/// two, mostly beside an idle one: half of the reads that took longer than 0.6 ms beside a writer flat out waited for such a thread.
/// One of the class of batches takes no processor from others when it wakes, and gives way at once to whoever wakes and asks for a shorter
/// turn (Linux from 6.12 on; before, the class is all there is of this). A program that was given another class keeps it.
#[cfg(target_os = "linux")]
pub(crate) fn work_in_batches() {
    /// Ten or twenty times what threads have that ask for nothing.
    const SLICE_NS: u64 = 30_000_000;

    // SAFETY: takes nothing but numbers. 0 is the calling thread.
    let class = unsafe { libc::syscall(libc::SYS_sched_getscheduler, 0) };
    if class != libc::c_long::from(libc::SCHED_OTHER) {
        return;
    }
    let nice = rustix::process::getpriority_process(None).unwrap_or(0);
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_BATCH as u32,
        sched_flags: 0,
        sched_nice: nice,
        sched_priority: 0,
        sched_runtime: SLICE_NS,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the call reads as many bytes of `attributes` as it says itself, and changes nothing but how the calling thread (0) is scheduled.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "cannot have a thread scheduled in batches");
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn work_in_batches() {}

#[cfg(all(test, target_os = "linux", not(loom), not(miri)))]
mod tests {
    use super::*;

    /// In a thread of its own, for it cannot take its nice value back.
    #[test]
    fn a_thread_of_low_priority_works_in_batches() {
        let thread = std::thread::spawn(|| {
            lower_priority(7);
            work_in_batches();
            let statistics = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            let (_, fields) = statistics.rsplit_once(") ").unwrap();
            let fields: Vec<i64> = fields
                .split(' ')
                .map(|it| it.parse().unwrap_or(0))
                .collect();
            // Fields 19 and 41 of proc(5), counted from 1; the first two are cut off.
            assert_eq!((fields[16], fields[38]), (7, libc::SCHED_BATCH.into()));
        });
        thread.join().unwrap();
    }

    /// That of programs which have what nobody else wants.
    #[test]
    fn a_thread_of_another_class_stays_there() {
        let class = || {
            // SAFETY: takes nothing but numbers.
            unsafe { libc::syscall(libc::SYS_sched_getscheduler, 0) }
        };
        let thread = std::thread::spawn(move || {
            let none = libc::sched_param { sched_priority: 0 };
            // SAFETY: reads the structure, and changes nothing but how this thread is scheduled.
            let set = unsafe {
                libc::syscall(
                    libc::SYS_sched_setscheduler,
                    0,
                    libc::SCHED_IDLE,
                    &raw const none,
                )
            };
            assert_eq!(set, 0);
            work_in_batches();
            assert_eq!(class(), libc::c_long::from(libc::SCHED_IDLE));
        });
        thread.join().unwrap();
    }
}
