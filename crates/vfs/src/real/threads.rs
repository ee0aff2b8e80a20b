//! Several reads at once by a few threads, where `io_uring` is not allowed.

use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use parking_lot::Mutex;

use crate::{FinishedRead, PendingReads, ReadRequest};

/// Enough for the tables of one short scan; they sleep nearly always.
const THREADS: usize = 4;

type Job = (usize, ReadRequest, Sender<(usize, FinishedRead)>);

/// Threads of this process, made at the first use; `None` if there can be none.
static JOBS: OnceLock<Option<Mutex<Sender<Job>>>> = OnceLock::new();

fn jobs() -> Option<Sender<Job>> {
    let jobs = JOBS.get_or_init(|| {
        let (sender, receiver) = mpsc::channel::<Job>();
        let receiver = std::sync::Arc::new(Mutex::new(receiver));
        let started = (0..THREADS).filter(|_| {
            let receiver = receiver.clone();
            let name = thread::Builder::new().name("lightkv-read".into());
            name.spawn(move || work(&receiver)).is_ok()
        });
        (started.count() > 0).then(|| Mutex::new(sender))
    });
    Some(jobs.as_ref()?.lock().clone())
}

fn work(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().recv();
        let Ok((place, request, reply)) = job else {
            return;
        };
        // Nobody waits any more: then the answer is not wanted.
        let _ = reply.send((place, request.read()));
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
        let Some(jobs) = jobs() else {
            return Err(requests);
        };
        let (reply, finished) = mpsc::channel();
        let count = requests.len();
        for (place, request) in requests.into_iter().enumerate() {
            if let Err(refused) = jobs.send((place, request, reply.clone())) {
                let (place, request, _) = refused.0;
                let _ = reply.send((place, request.read()));
            }
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
