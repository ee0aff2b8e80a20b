//! Several reads at once, and writes that nobody waits for yet, by a few threads, where `io_uring` is not allowed.

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, OnceLock};
use std::thread;

use parking_lot::Mutex;

use crate::{FinishedRead, FinishedWrite, PendingReads, PendingWrite, ReadRequest, WriteRequest};

/// Enough for the tables of one short scan; they sleep nearly always.
static READERS: Threads = Threads::new("lightkv-read", 4);
/// One for each thread of a store that writes tables, by default.
static WRITERS: Threads = Threads::new("lightkv-write", 3);

type Job = Box<dyn FnOnce() + Send>;

/// Threads of this process, made at the first use.
struct Threads {
    name: &'static str,
    count: usize,
    /// `None` if there can be no threads.
    jobs: OnceLock<Option<Mutex<Sender<Job>>>>,
}

impl Threads {
    const fn new(name: &'static str, count: usize) -> Self {
        Self {
            name,
            count,
            jobs: OnceLock::new(),
        }
    }

    /// Where jobs are sent to; `None` if there are no threads.
    fn jobs(&self) -> Option<Sender<Job>> {
        let jobs = self.jobs.get_or_init(|| {
            let (sender, receiver) = mpsc::channel::<Job>();
            let receiver = Arc::new(Mutex::new(receiver));
            let started = (0..self.count).filter(|_| {
                let receiver = receiver.clone();
                let name = thread::Builder::new().name(self.name.into());
                name.spawn(move || work(&receiver)).is_ok()
            });
            (started.count() > 0).then(|| Mutex::new(sender))
        });
        Some(jobs.as_ref()?.lock().clone())
    }
}

fn work(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().recv();
        let Ok(job) = job else {
            return;
        };
        job();
    }
}

/// Hands a job to a thread; does it if there is none any more.
fn send(jobs: &Sender<Job>, job: impl FnOnce() + Send + 'static) {
    if let Err(refused) = jobs.send(Box::new(job)) {
        (refused.0)();
    }
}

/// Reads that threads are doing.
#[derive(Debug)]
pub(super) struct ThreadReads {
    count: usize,
    finished: Receiver<(usize, FinishedRead)>,
}

impl ThreadReads {
    /// Begins reads; gives them back if there are no threads.
    pub(super) fn start(requests: Vec<ReadRequest>) -> Result<Self, Vec<ReadRequest>> {
        let Some(jobs) = READERS.jobs() else {
            return Err(requests);
        };
        let (reply, finished) = mpsc::channel();
        let count = requests.len();
        for (place, request) in requests.into_iter().enumerate() {
            let reply = reply.clone();
            // Nobody waits any more: then the answer is not wanted.
            send(&jobs, move || drop(reply.send((place, request.read()))));
        }
        Ok(Self { count, finished })
    }
}

impl PendingReads for ThreadReads {
    fn wait(self: Box<Self>) -> Vec<FinishedRead> {
        let mut all: Vec<Option<FinishedRead>> = (0..self.count).map(|_| None).collect();
        for (place, read) in self.finished.iter().take(self.count) {
            all[place] = Some(read);
        }
        let lost = || FinishedRead {
            buffer: Default::default(),
            range: Err(std::io::Error::other("a thread that reads has died")),
        };
        all.into_iter()
            .map(|read| read.unwrap_or_else(lost))
            .collect()
    }
}

/// A write that a thread is doing.
#[derive(Debug)]
pub(super) struct ThreadWrite {
    finished: Receiver<FinishedWrite>,
}

impl ThreadWrite {
    /// Begins a write; gives it back if there are no threads.
    pub(super) fn start(request: WriteRequest) -> Result<Self, WriteRequest> {
        let Some(jobs) = WRITERS.jobs() else {
            return Err(request);
        };
        let (reply, finished) = mpsc::channel();
        // As above.
        send(&jobs, move || drop(reply.send(request.write())));
        Ok(Self { finished })
    }

    fn end(&self) -> FinishedWrite {
        self.finished.recv().unwrap_or_else(|_| FinishedWrite {
            buffer: Vec::new(),
            result: Err(std::io::Error::other("a thread that writes has died")),
        })
    }
}

impl PendingWrite for ThreadWrite {
    fn wait(self: Box<Self>) -> FinishedWrite {
        self.end()
    }
}

impl Drop for ThreadWrite {
    fn drop(&mut self) {
        // The file may be removed or written to next. After `wait` there is nobody to answer, which is known at once.
        self.end();
    }
}
