//! The part of an engine that a journal needs: a manifest, sequence numbers, and a memory of what was
//! appended, synced and released.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lightkv_journal::{
    Appended, Journal, JournalError, JournalOptions, JournalPosition, Payload, ReplayError, Result,
    Truncation,
};
use lightkv_vfs::{DeviceTurns, MemoryVfs, OpenMode, Vfs};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

pub(crate) const IDENTITY: u64 = 0x1234_5678_9abc_def0;
pub(crate) const FILE_BYTES: u64 = 16 << 10;

pub(crate) fn directory() -> PathBuf {
    PathBuf::from("/store/journal")
}

/// What the engine keeps durable beside the journal.
#[derive(Clone, Debug, Default)]
pub(crate) struct Manifest {
    pub(crate) first_live_generation: u64,
    pub(crate) truncations: Vec<Truncation>,
    /// Not part of it; handed on with the rest.
    pub(crate) device: Option<Arc<DeviceTurns>>,
    /// Neither is this: spare files beyond the two that there may be.
    pub(crate) more_spare_files: usize,
}

impl Manifest {
    pub(crate) fn options(&self) -> JournalOptions<'_> {
        JournalOptions {
            file_bytes: FILE_BYTES,
            spare_files_max: 2 + self.more_spare_files,
            first_live_generation: self.first_live_generation,
            truncations: &self.truncations,
            device: self.device.as_ref(),
            ..JournalOptions::new(IDENTITY)
        }
    }
}

/// The content of an entry, a function of its sequence number, so that any mixture is noticed.
pub(crate) fn payload(sequence: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(sequence).fill(bytes.as_mut_slice());
    bytes
}

/// What the entry of a number is about: several are about the same.
pub(crate) fn signature(sequence: u64) -> u32 {
    (sequence % 7) as u32 * 600_000_007
}

/// A store with nothing but a journal.
pub(crate) struct Store {
    pub(crate) vfs: MemoryVfs,
    pub(crate) manifest: Manifest,
    pub(crate) journal: Journal,
    /// Length and place of every entry that is part of history, by sequence number.
    pub(crate) entries: BTreeMap<u64, (usize, Appended)>,
    pub(crate) next_sequence: u64,
    /// Entries below survive power loss.
    pub(crate) synced_sequence: u64,
    /// Entries below need not be replayed.
    pub(crate) released_sequence: u64,
}

/// One replayed entry: sequence number, position, payload.
pub(crate) type Replayed = Vec<(u64, JournalPosition, Vec<u8>)>;

/// All entries that a recovery would replay.
pub(crate) fn replay(vfs: &MemoryVfs, manifest: &Manifest) -> Result<Replayed> {
    let mut recovered = Journal::open(Arc::new(vfs.clone()), &directory(), manifest.options())?;
    let mut entries = Vec::new();
    let outcome = recovered.replay(|entry| {
        entries.push((entry.first_sequence, entry.position, entry.payload.to_vec()));
        Ok::<(), Infallible>(())
    });
    match outcome {
        Ok(()) => Ok(entries),
        Err(ReplayError::Journal(error)) => Err(error),
        Err(ReplayError::Receiver(never)) => match never {},
    }
}

impl Store {
    /// A new store.
    pub(crate) fn create() -> Store {
        Store::create_with(Manifest::default())
    }

    pub(crate) fn create_with(manifest: Manifest) -> Store {
        let vfs = MemoryVfs::new();
        vfs.offer_direct();
        vfs.create_directory(&directory()).unwrap();
        vfs.sync_directory(Path::new("/")).unwrap();
        vfs.sync_directory(Path::new("/store")).unwrap();
        Store::open(vfs, manifest)
    }

    /// Opens what is there; what is replayed is taken for history.
    pub(crate) fn open(vfs: MemoryVfs, manifest: Manifest) -> Store {
        Store::try_open(vfs, manifest).unwrap()
    }

    pub(crate) fn try_open(vfs: MemoryVfs, mut manifest: Manifest) -> Result<Store> {
        let options = manifest.options();
        let mut recovered = Journal::open(Arc::new(vfs.clone()), &directory(), options)?;
        let mut entries = BTreeMap::new();
        let outcome = recovered.replay(|entry| {
            let sequence = entry.first_sequence;
            let appended = Appended {
                first_sequence: sequence,
                position: entry.position,
                end: entry.end,
            };
            assert_eq!(entry.payload, payload(sequence, entry.payload.len()));
            entries.insert(sequence, (entry.payload.len(), appended));
            Ok::<(), Infallible>(())
        });
        match outcome {
            Ok(()) => {}
            Err(ReplayError::Journal(error)) => return Err(error),
            Err(ReplayError::Receiver(never)) => match never {},
        }
        let finished = recovered.finish_recovery()?;
        let generation = finished.truncation.generation;
        manifest
            .truncations
            .retain(|cut| cut.generation != generation);
        manifest.truncations.push(finished.truncation);
        let next_sequence = entries.last_key_value().map_or(1, |(last, _)| last + 1);
        let synced = finished.journal.synced_position();
        let synced_sequence = entries
            .values()
            .find(|(_, appended): &&(usize, Appended)| appended.end > synced)
            .map_or(next_sequence, |(_, appended)| appended.first_sequence);
        Ok(Store {
            vfs,
            manifest,
            journal: finished.journal,
            released_sequence: entries.first_key_value().map_or(1, |(first, _)| *first),
            entries,
            next_sequence,
            synced_sequence,
        })
    }

    pub(crate) fn append(&mut self, len: usize) -> Result<Appended> {
        let sequence = self.next_sequence;
        let bytes = payload(sequence, len);
        let (head, tail) = bytes.split_at(len / 3);
        let parts = [head, tail];
        let signatures = [signature(sequence)];
        let payload = Payload::new(&parts)?.about(&signatures);
        let appended = self.journal.append_payload(&payload, 1, || sequence)?;
        assert_eq!(appended.first_sequence, sequence);
        self.entries.insert(sequence, (len, appended));
        self.next_sequence += 1;
        Ok(appended)
    }

    pub(crate) fn sync(&mut self) -> Result<()> {
        self.journal.sync(self.journal.next_position())?;
        self.synced_sequence = self.next_sequence;
        Ok(())
    }

    /// As an engine that has flushed everything below a sequence number: the manifest first.
    pub(crate) fn release_below(&mut self, sequence: u64) {
        let position = match self.entries.range(sequence..).next() {
            Some((_, (_, appended))) => appended.position,
            None => self.journal.next_position(),
        };
        self.manifest.first_live_generation = position.generation();
        self.manifest
            .truncations
            .retain(|cut| cut.generation >= position.generation());
        self.journal.release_before(position);
        self.released_sequence = self.released_sequence.max(sequence);
    }

    /// Checks what a crash left: a prefix of history without a hole, with all that must be there.
    pub(crate) fn check_survivors(&self, survivors: &Replayed, must_reach: u64, context: &str) {
        let first = survivors
            .first()
            .map_or(self.released_sequence, |(first, ..)| *first);
        assert!(
            first <= self.released_sequence,
            "{context}: lost the beginning, first is {first}"
        );
        let mut reached = self.released_sequence;
        // Not simply consecutive numbers: entries that were released and then lost in an earlier life
        // left a gap.
        let mut expected = self.entries.range(first..);
        for (sequence, position, bytes) in survivors {
            let (expected_sequence, (len, appended)) =
                expected.next().expect("more survivors than entries");
            assert_eq!(
                sequence, expected_sequence,
                "{context}: a hole or a wrong order"
            );
            let len = *len;
            assert_eq!(*bytes, payload(*sequence, len), "{context}: wrong bytes");
            assert_eq!(*position, appended.position, "{context}: wrong place");
            reached = reached.max(sequence + 1);
        }
        assert!(
            reached >= must_reach,
            "{context}: history ends before {reached}, must reach {must_reach}"
        );
        assert!(reached <= self.next_sequence, "{context}: too much");
    }
}

/// The names of the journal's files, without those of staging.
pub(crate) fn file_names(vfs: &MemoryVfs) -> Vec<String> {
    let mut names = names(vfs);
    names.retain(|name| name.ends_with(".log"));
    names
}

/// The names of the staging files.
pub(crate) fn staging_names(vfs: &MemoryVfs) -> Vec<String> {
    let mut names = names(vfs);
    names.retain(|name| name.starts_with("staging-"));
    names
}

/// An image as of a process that had written everything to the journal's files.
pub(crate) fn without_staging(image: MemoryVfs) -> MemoryVfs {
    for name in staging_names(&image) {
        image.remove_file(&directory().join(name)).unwrap();
    }
    image
}

fn names(vfs: &MemoryVfs) -> Vec<String> {
    let entries = vfs.list(&directory()).unwrap();
    entries.into_iter().map(|entry| entry.name).collect()
}

pub(crate) fn read_file(vfs: &MemoryVfs, path: &Path) -> Vec<u8> {
    let file = vfs.open(path, OpenMode::Read).unwrap();
    let mut bytes = vec![0; file.len_bytes().unwrap() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

pub(crate) fn write_file(vfs: &MemoryVfs, path: &Path, bytes: &[u8], offset: u64) {
    let file = vfs.open(path, OpenMode::ReadWrite).unwrap();
    file.write_all_at(bytes, offset).unwrap();
    file.sync_data().unwrap();
}

/// The file that holds a generation.
pub(crate) fn file_of(vfs: &MemoryVfs, generation: u64) -> PathBuf {
    file_names(vfs)
        .into_iter()
        .map(|name| directory().join(name))
        .find(|path| read_file(vfs, path)[24..32] == generation.to_le_bytes())
        .expect("no file of this generation")
}

#[track_caller]
pub(crate) fn assert_corruption<T>(outcome: Result<T>, at_offset: Option<u64>) {
    match outcome.err() {
        Some(JournalError::Corruption { offset, .. }) => {
            assert!(
                at_offset.is_none_or(|expected| expected == offset),
                "{offset}"
            );
        }
        other => panic!("expected corruption, got {other:?}"),
    }
}
