//! Space that goes back to the file system, a little at a time.
//!
//! Many file systems tell the device at once of what was freed (mounted with `discard`), and a device may do nothing else meanwhile: one took
//! 0.08 ms for each such message and 0.17 ms for each MiB, so that a read waited 3 ms behind the end of a file of 16 MiB
//! (docs/benchmarks.md, "What reads beside a writer wait for"). So files lose [`CUT_BYTES`] at a time, in [turns](DeviceTurns) beside reads that
//! somebody waits for. Where nothing is told, or later and all at once, this costs a call for each cut.
//!
//! Some devices take only so much back in a second, and let everything else wait meanwhile: one had time for 130 to 170 MB/s, writes for
//! tables and the journal fell to a third beside that, and below 50 MB/s it hardly noticed (docs/benchmarks.md, "Space that is given back
//! slowly"). So what nobody waits for goes at [`BYTES_PER_SECOND`], of the journal and of the tables each. Beside reads that somebody waits for
//! it goes at [`BYTES_PER_SECOND_BESIDE_READS`]: there a message took 2 ms however short it was, and 1.5 ms for each MiB, and with more than a few
//! in a second the slowest thousandth of the reads was those behind one (docs/benchmarks.md, "Reads behind a device that takes space back").
//! Smaller cuts would have made more of them.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{DeviceTurns, OpenMode, ReadMark, Urgency, Vfs, VfsFile};

/// How much a file loses at a time, in bytes: as long as a read waits for the device anyway.
const CUT_BYTES: u64 = 512 << 10;

/// How much the journal, and how much the tables, give back in a second where nobody waits for the space, nor for a read.
const BYTES_PER_SECOND: u64 = 25 << 20;

/// The same where somebody waits for reads.
const BYTES_PER_SECOND_BESIDE_READS: u64 = 1 << 20;

/// When who gives back in [steps](RemovedFile::give_back_some), and is not waited for, may make the next one.
#[derive(Debug)]
pub struct GiveBackPace {
    due_at: Instant,
    last_step: ReadMark,
    catch_up_max: Duration,
}

impl GiveBackPace {
    /// The first step is due at once. Who looks late makes those at once that would have been due in `catch_up_max`.
    pub fn new(catch_up_max: Duration) -> Self {
        Self {
            due_at: Instant::now(),
            last_step: ReadMark::default(),
            catch_up_max,
        }
    }

    /// When the next step may be made.
    pub fn due_at(&self) -> Instant {
        self.due_at
    }

    /// Notes that one was made. Without a device nobody reads.
    pub fn step(&mut self, device: Option<&DeviceTurns>) {
        let is_beside_reads = device.is_some_and(|device| self.last_step.move_on(device));
        let interval = Self::interval(is_beside_reads);
        let now = Instant::now();
        let earliest = now.checked_sub(self.catch_up_max).unwrap_or(now);
        self.due_at = self.due_at.max(earliest) + interval;
    }

    /// How long the device is left alone between two steps, with or without reads since the last one.
    pub fn interval(is_beside_reads: bool) -> Duration {
        let bytes_per_second = if is_beside_reads {
            BYTES_PER_SECOND_BESIDE_READS
        } else {
            BYTES_PER_SECOND
        };
        Duration::from_millis(1000 * CUT_BYTES / bytes_per_second)
    }
}

/// Shortens a file from one length to another, in bytes.
pub fn shorten(file: &dyn VfsFile, from: u64, to: u64, device: &DeviceTurns) -> io::Result<()> {
    let mut len = from;
    while len > to {
        len = to.max(len.saturating_sub(CUT_BYTES));
        device.transfer(Urgency::Patient, || file.set_len(len))?;
    }
    Ok(())
}

/// As [`Vfs::remove_file`], for a file that nobody reads or maps, in whatever process, nor will if it has other names: whoever had it open
/// would find its end gone.
///
/// The name goes first, so what an interruption leaves is a file or none, never a part of one. A file with another name keeps all that it has.
pub fn remove_unread(vfs: &dyn Vfs, path: &Path, device: &DeviceTurns) -> io::Result<()> {
    let mut removed = RemovedFile::new(vfs, path)?;
    while removed.give_back_some(device) {}
    Ok(())
}

/// A file that has no name any more, and still takes space: [`remove_unread`] in steps, for who has other things to do in between. Dropped, it gives
/// back all that it has at once.
#[derive(Debug)]
pub struct RemovedFile {
    /// If something is left to be given back.
    file: Option<(Arc<dyn VfsFile>, u64)>,
}

impl RemovedFile {
    /// Removes the name of a file, as [`remove_unread`].
    pub fn new(vfs: &dyn Vfs, path: &Path) -> io::Result<Self> {
        let is_only_name = matches!(vfs.link_count(path), Ok(1));
        let file = is_only_name.then(|| vfs.open(path, OpenMode::ReadWrite));
        vfs.remove_file(path)?;
        let file = file.and_then(|opened| {
            let file = opened.ok()?;
            let len = file.len_bytes().ok()?;
            Some((file, len))
        });
        Ok(Self { file })
    }

    /// Gives a part back; tells whether there is more. The last one goes when the file is closed.
    pub fn give_back_some(&mut self, device: &DeviceTurns) -> bool {
        let has_more = match &mut self.file {
            Some((file, len)) if *len > CUT_BYTES => {
                *len -= CUT_BYTES;
                // What cannot be cut goes at once.
                let cut = device.transfer(Urgency::Patient, || file.set_len(*len));
                cut.is_ok() && *len > CUT_BYTES
            }
            _ => false,
        };
        if !has_more {
            self.file = None;
        }
        has_more
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::{MemoryVfs, Operation};

    const PATH: &str = "/file";
    const LEN: u64 = 3 * CUT_BYTES + 10;

    /// A file system with a file, and what is done to it from then on.
    fn with_file() -> (MemoryVfs, Arc<dyn VfsFile>, Arc<Mutex<Vec<Operation>>>) {
        let vfs = MemoryVfs::new();
        let file = vfs.open(Path::new(PATH), OpenMode::CreateNew).unwrap();
        file.write_all_at(&vec![7; LEN as usize], 0).unwrap();
        let done = Arc::new(Mutex::new(Vec::new()));
        let note = done.clone();
        vfs.observe_changes(Some(Arc::new(move |operation| note.lock().push(operation))));
        (vfs, file, done)
    }

    #[test]
    fn steps_beside_reads_are_rarer_and_late_ones_are_made_up_for_in_part() {
        let (alone, beside) = (GiveBackPace::interval(false), GiveBackPace::interval(true));
        assert_eq!(alone * 25, beside);
        let mut pace = GiveBackPace::new(Duration::ZERO);
        let device = DeviceTurns::default();
        let mut next = || {
            let begin = Instant::now();
            pace.step(Some(&device));
            pace.due_at() - begin
        };
        // Steps are made before they are due here: their intervals add up.
        let first = next();
        assert!(first >= alone && first < beside);
        drop(device.waiting_read());
        let second = next();
        assert!(second >= beside, "reads came");
        assert!(next() < second + beside, "none came since");
        let mut late = GiveBackPace::new(10 * alone);
        std::thread::sleep(2 * alone);
        late.step(None);
        assert!(late.due_at() < Instant::now(), "a second one is due, too");
        let mut later = GiveBackPace::new(alone / 2);
        std::thread::sleep(2 * alone);
        let begin = Instant::now();
        later.step(None);
        assert!(
            later.due_at() >= begin + alone / 2,
            "that is as late as it counts"
        );
    }

    #[test]
    fn a_file_is_shortened_by_steps() {
        let (_vfs, file, done) = with_file();
        let device = DeviceTurns::default();
        shorten(&*file, LEN, 5, &device).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 5);
        assert_eq!(*done.lock(), [Operation::SetLen; 4]);
        shorten(&*file, 5, 5, &device).unwrap();
        assert_eq!(done.lock().len(), 4, "nothing was left to cut");
    }

    #[test]
    fn the_name_goes_first_and_the_space_by_steps() {
        let (vfs, file, done) = with_file();
        remove_unread(&vfs, Path::new(PATH), &DeviceTurns::default()).unwrap();
        assert!(!vfs.exists(Path::new(PATH)).unwrap());
        let steps = [Operation::SetLen; 3];
        assert_eq!(*done.lock(), [&[Operation::Remove], &steps[..]].concat());
        assert_eq!(file.len_bytes().unwrap(), 10);
    }

    #[test]
    fn what_has_another_name_keeps_its_content() {
        let (vfs, file, _) = with_file();
        vfs.hard_link(Path::new(PATH), Path::new("/other")).unwrap();
        remove_unread(&vfs, Path::new(PATH), &DeviceTurns::default()).unwrap();
        assert_eq!(file.len_bytes().unwrap(), LEN);
        let missing = remove_unread(&vfs, Path::new(PATH), &DeviceTurns::default());
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
