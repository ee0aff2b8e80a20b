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

/// Lets the calling thread have as much of the processor as before, but take it from nobody when it wakes up.
///
/// A thread that is woken by its write's end takes the processor from whoever runs where the device interrupts, and keeps it for a millisecond or
/// two, mostly beside an idle one: half of the reads that took longer than 0.6 ms beside a writer flat out waited for such a thread.
/// One of the class of batches waits for the end of the other one's turn. A program that was given another class keeps it.
///
/// Not more than that: longer turns, which come later (30 ms, Linux from 6.12 on), spare readers a little more where processors are idle. But where they are
/// busy with something else a thread waits for nine turns of each of the others whenever it wakes up, and flushes are made of
/// waits: writers stood still for 20 s.
#[cfg(target_os = "linux")]
pub(crate) fn work_in_batches() {
    // SAFETY: takes nothing but numbers. 0 is the calling thread.
    let class = unsafe { libc::syscall(libc::SYS_sched_getscheduler, 0) };
    if class != libc::c_long::from(libc::SCHED_OTHER) {
        return;
    }
    if let Err(error) = set_class(libc::SCHED_BATCH) {
        tracing::debug!(%error, "cannot have a thread scheduled in batches");
    }
}

/// Puts the calling thread into a scheduling class without priorities; its nice value stays.
#[cfg(target_os = "linux")]
fn set_class(class: libc::c_int) -> std::io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads the structure, and changes nothing but how the calling thread (0) is scheduled.
    let result = unsafe {
        libc::syscall(
            libc::SYS_sched_setscheduler,
            0,
            class,
            &raw const parameters,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
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
            set_class(libc::SCHED_IDLE).unwrap();
            work_in_batches();
            assert_eq!(class(), libc::c_long::from(libc::SCHED_IDLE));
        });
        thread.join().unwrap();
    }
}
