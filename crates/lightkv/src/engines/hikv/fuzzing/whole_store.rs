//! A whole store in whose pool words were changed, by somebody who can put checksums right.

use std::sync::{Arc, OnceLock};

use lightkv_pmem::{Arena, EmulatedBacking, EmulatedMedium, PoolImage, Run};
use lightkv_vfs::MemoryVfs;

use super::super::allocator::{KIND_LOG, KIND_REDO, KIND_ROOT};
use super::super::hash_index::Table;
use super::super::item_layout::{HEADER_LEN, ItemHeader, Place};
use super::super::log_layout::{ALIGNMENT, LogPlace};
use super::super::open;
use super::super::redo_layout::RedoPlace;
use super::super::root_layout::{ENTRY_BYTES, Entry};
use super::{IDENTITY, seal_item, seal_log_record, seal_redo_record, seal_root, u64_at};
use crate::{Db, EngineKind, Error, Options, PoolMedium, Result, Tuning, WriteBatch};

const POOL_BYTES: u64 = 128 << 10;
/// What is put right, by the bits of the first byte.
const SEALS_ROOT: u8 = 1;
const SEALS_ITEMS: u8 = 2;
const SEALS_REDO: u8 = 4;
const SEALS_LOG: u8 = 8;
/// Bytes of an edit: which word, counted from the root on, and its new content.
const EDIT_LEN: usize = 10;

/// A store that a kill left.
struct Base {
    image: PoolImage,
    files: MemoryVfs,
    root: u64,
    /// Places of the entries, those that are free included.
    entries: Vec<u64>,
    redo: Vec<Run>,
    logs: Vec<Run>,
}

fn options(files: &MemoryVfs, backing: EmulatedBacking, has_log: bool) -> Options {
    Options::new()
        .engine(EngineKind::HiKv)
        .vfs(Arc::new(files.clone()))
        .pool_medium(PoolMedium::Emulated(EmulatedMedium::new(backing)))
        .tuning(Tuning {
            max_leaf_nodes: Some(2),
            leaf_entries: Some(16),
            chunk_bytes: Some(4 << 10),
            pool_bytes: Some(POOL_BYTES),
            identity: Some(IDENTITY),
            recovery_threads: Some(1),
            inline_background: true,
            write_ahead_log: has_log,
            ..Tuning::default()
        })
}

fn base() -> &'static Base {
    static BASE: OnceLock<Base> = OnceLock::new();
    BASE.get_or_init(|| make_base().expect("a store in memory"))
}

fn make_base() -> Result<Base> {
    let (files, backing) = (MemoryVfs::new(), EmulatedBacking::untracked());
    let options = options(&files, backing.clone(), true);
    let db = options.open("/store")?;
    for number in 0..20_u8 {
        db.put(format!("key {number}"), vec![number; number as usize * 3])?;
    }
    let mut batch = WriteBatch::new();
    batch.put("key 3", "of a batch").delete("key 4");
    db.write(batch)?;
    // Longer than a slot, and what the log has.
    db.put("large", vec![5; 2000])?;
    db.delete("key 5")?;
    // The same as a kill leaves.
    let (image, files) = (backing.image(), files.kill_image());
    drop(db);
    let (copy, plain) = (files.kill_image(), image.clone());
    let medium = EmulatedBacking::untracked_from_image(plain);
    let mut runs = Vec::new();
    {
        // Opened to see what is where; a recovery moves nothing that has a use.
        let store = open::open("/store".as_ref(), &self::options(&copy, medium, false))?;
        let guard = crossbeam_epoch::pin();
        let tables = (0..store.index.len()).map(|number| store.index.partition(number));
        let places: Vec<u64> = tables
            .map(|partition| partition.table(&guard))
            .flat_map(|table: &Table| {
                (0..table.group_count()).flat_map(|group| table.group_entries(group))
            })
            .collect();
        let root = store.pool().runs(Arena::Segments);
        let root = root.iter().find(|run| run.kind == KIND_ROOT);
        let root = root.expect("a store has a root").offset;
        // Of the image as it was left: a recovery frees those of logs and batches.
        let left = lightkv_pmem::Pool::open(lightkv_pmem::PoolOptions {
            source: lightkv_pmem::SourceRequest::Emulated(EmulatedMedium::new(
                EmulatedBacking::untracked_from_image(image.clone()),
            )),
            identity: IDENTITY,
            engine_kind: EngineKind::HiKv.code(),
            max_bytes: POOL_BYTES,
            extent_bytes: POOL_BYTES,
            segment_unit_bytes: super::super::allocator::UNIT_BYTES as u32,
            block_unit_bytes: 0,
            always_flush: false,
            faults: Default::default(),
        })?;
        runs.extend(left.runs(Arena::Segments));
        let of_kind = |kind| runs.iter().filter(move |run| run.kind == kind).copied();
        Ok(Base {
            root,
            entries: places,
            redo: of_kind(KIND_REDO).collect(),
            logs: of_kind(KIND_LOG).collect(),
            image,
            files,
        })
    }
}

/// Edits that a crash could not have made: an entry that leads to the item of another, a table word that is another
/// one's, lengths and numbers of an item, a redo record that counts.
pub fn hikv_store_seeds() -> Vec<Vec<u8>> {
    let base = base();
    let edit = |offset: u64, value: u64| {
        let word = ((offset - base.root) / 8) as u16;
        [&word.to_le_bytes()[..], &value.to_le_bytes()].concat()
    };
    let word = |offset: u64| u64_at(&base.image.bytes, offset as usize);
    let used: Vec<u64> = base
        .entries
        .iter()
        .copied()
        .filter(|entry| word(*entry) != 0)
        .collect();
    let item = word(used[0] + 8);
    let log = base.logs[0].offset + ALIGNMENT;
    let redo = base.redo[0].offset;
    let seeds = [
        (0, vec![]),
        (0, vec![edit(used[0], 0), edit(used[0] + 8, 0)]),
        (2, vec![edit(used[0] + 8, word(used[1] + 8))]),
        (
            2,
            vec![edit(used[1] + 8, item), edit(used[1], word(used[0]))],
        ),
        (1, vec![edit(base.root + 64, word(base.root + 72))]),
        (2, vec![edit(item, word(item) + (1 << 32))]),
        (2, vec![edit(item + 8, word(item + 8) + 1)]),
        (2, vec![edit(item + 16, u64::MAX)]),
        (4, vec![edit(redo, 99), edit(redo + 32, 5)]),
        (8, vec![edit(log + 24, used[1]), edit(log + 32, item)]),
        (8, vec![edit(log + 32, base.root)]),
    ];
    let of = |(flags, edits): (u8, Vec<Vec<u8>>)| [vec![flags], edits.concat()].concat();
    seeds.map(of).to_vec()
}

/// A store in whose pool words were changed: refused with an error that says so, or sound, and then it can be written to
/// and stays sound.
pub fn hikv_store(input: &[u8]) {
    let Some((&flags, edits)) = input.split_first() else {
        return;
    };
    let base = base();
    let mut image = base.image.clone();
    let words = (image.bytes.len() as u64 - base.root) / 8;
    for edit in edits.as_chunks::<EDIT_LEN>().0 {
        let word = u64::from(u16::from_le_bytes([edit[0], edit[1]])) % words;
        let at = (base.root + word * 8) as usize;
        image.bytes[at..at + 8].copy_from_slice(&edit[2..]);
    }
    seal(&mut image.bytes, flags, base);
    let files = base.files.kill_image();
    let backing = EmulatedBacking::untracked_from_image(image);
    let db = match options(&files, backing, flags & 16 != 0).open("/store") {
        Ok(db) => db,
        Err(Error::Corruption { .. } | Error::NewerVersion { .. } | Error::NoSpace { .. }) => {
            return;
        }
        Err(Error::InvalidOption {
            option: "pool_bytes",
            ..
        }) => return,
        Err(error) => panic!("refused with {error:?}"),
    };
    db.verify().expect("what was accepted is sound");
    read_and_write(&db);
    db.verify().expect("it stays sound");
    let keys = db.scan(..).count();
    db.close().expect("it closes");
    drop(db);
    assert!(keys > 0);
}

fn read_and_write(db: &Db) {
    let before: Vec<_> = db.scan(..).map(|entry| entry.expect("sound")).collect();
    assert!(before.is_sorted_by(|left, right| left.0 < right.0));
    for (key, value) in &before {
        assert_eq!(db.get(key).expect("sound").as_ref(), Some(value));
    }
    let mut batch = WriteBatch::new();
    batch.put("key 1", "once more").put("new", "in a batch");
    let writes = [
        db.put("key 2", "replaced"),
        db.put("key 77", vec![7; 900]),
        db.delete("key 3"),
        db.write(batch),
    ];
    for outcome in writes {
        // A number that was changed to the last one there is cannot be followed by another.
        assert!(
            matches!(outcome, Ok(()) | Err(Error::NoSpace { .. })),
            "{outcome:?}"
        );
    }
    assert_eq!(db.get("key 3").expect("sound"), None);
}

/// Puts the checksums right that the flags name.
fn seal(bytes: &mut [u8], flags: u8, base: &Base) {
    if flags & SEALS_ROOT != 0
        && let Some(root) = bytes[base.root as usize..].first_chunk_mut()
    {
        seal_root(root);
    }
    if flags & SEALS_REDO != 0 {
        for run in &base.redo {
            let place = RedoPlace {
                identity: IDENTITY,
                offset: run.offset,
                generation: run.generation,
            };
            seal_redo_record(run_of(bytes, run), place);
        }
    }
    if flags & SEALS_LOG != 0 {
        for run in &base.logs {
            let epoch = u64_at(bytes, run.offset as usize);
            for at in (ALIGNMENT..run.len_bytes).step_by(ALIGNMENT as usize) {
                let place = LogPlace {
                    identity: IDENTITY,
                    offset: run.offset + at,
                    generation: run.generation,
                    epoch,
                };
                let record = &mut run_of(bytes, run)[at as usize..];
                // An area is zeros behind its records.
                if record.iter().take(8).any(|byte| *byte != 0) {
                    seal_log_record(record, place);
                }
            }
        }
    }
    if flags & SEALS_ITEMS != 0 {
        for entry in &base.entries {
            debug_assert!(entry.is_multiple_of(ENTRY_BYTES));
            let word = bytes[*entry as usize..]
                .first_chunk()
                .expect("a whole entry");
            let position = Entry::decode(u128::from_le_bytes(*word)).position;
            seal_item_at(bytes, position);
        }
    }
}

fn run_of<'a>(bytes: &'a mut [u8], run: &Run) -> &'a mut [u8] {
    &mut bytes[run.offset as usize..(run.offset + run.len_bytes) as usize]
}

fn seal_item_at(bytes: &mut [u8], position: u64) {
    let item = usize::try_from(position)
        .ok()
        .and_then(|at| bytes.get_mut(at..));
    let Some(item) = item.filter(|item| position != 0 && item.len() >= HEADER_LEN) else {
        return;
    };
    let extent = ItemHeader::of_bytes(item.first_chunk().expect("checked")).extent();
    if let Some(item) = item.get_mut(..extent.len()) {
        let place = Place {
            pool_identity: IDENTITY,
            offset: position,
        };
        seal_item(item, place);
    }
}
