//! Tables and their models.

use lightkv_table::{EntryKind, TableOptions, TableReader, TableShared, TableSummary, TableWriter};
use lightkv_vfs::{MemoryVfs, Vfs};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) const SEED: u64 = 0x5EED;
pub(crate) const IDENTITY: u64 = 0x1DE7;
pub(crate) const TABLE_ID: u64 = 42;

/// All entries in the order of the table.
pub(crate) type Model = BTreeMap<(Vec<u8>, Reverse<u64>), (EntryKind, Vec<u8>)>;

pub(crate) fn options() -> TableOptions {
    TableOptions {
        hash_seed: SEED,
        store_identity: IDENTITY,
        ..TableOptions::default()
    }
}

pub(crate) fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

pub(crate) fn memory() -> Arc<dyn Vfs> {
    let vfs = MemoryVfs::new();
    vfs.create_directory(Path::new("store")).unwrap();
    Arc::new(vfs)
}

pub(crate) fn path() -> PathBuf {
    PathBuf::from("store/42.table")
}

pub(crate) fn shared() -> Arc<TableShared> {
    Arc::new(TableShared::new(8 << 20, 16))
}

pub(crate) fn write(vfs: &Arc<dyn Vfs>, options: TableOptions, model: &Model) -> TableSummary {
    let mut writer = TableWriter::create(Arc::clone(vfs), path(), TABLE_ID, options).unwrap();
    for ((key, Reverse(sequence)), (kind, value)) in model {
        writer.add(key, *sequence, *kind, value).unwrap();
    }
    writer.finish().unwrap()
}

pub(crate) fn open(
    vfs: &Arc<dyn Vfs>,
    options: TableOptions,
    shared: &Arc<TableShared>,
) -> Arc<TableReader> {
    let shared = Arc::clone(shared);
    let reader = TableReader::open(Arc::clone(vfs), path(), TABLE_ID, options, None, shared);
    Arc::new(reader.unwrap())
}

pub(crate) fn get(
    reader: &TableReader,
    key: &[u8],
    max_sequence: u64,
) -> Option<(u64, EntryKind, Vec<u8>)> {
    let hash = lightkv_table::hash_key(SEED, key);
    let found = reader.get(key, hash, max_sequence).unwrap();
    found.map(|found| (found.sequence, found.kind, found.value.into_vec()))
}

pub(crate) fn model_get(
    model: &Model,
    key: &[u8],
    max_sequence: u64,
) -> Option<(u64, EntryKind, Vec<u8>)> {
    let from = (key.to_vec(), Reverse(max_sequence));
    let ((found, Reverse(sequence)), (kind, value)) = model.range(from..).next()?;
    (found == key).then(|| (*sequence, *kind, value.clone()))
}

pub(crate) fn random_bytes(rng: &mut StdRng, len: usize) -> Vec<u8> {
    (0..len).map(|_| rng.random()).collect()
}

/// A key with many neighbours that share much of it.
pub(crate) fn random_key(rng: &mut StdRng) -> Vec<u8> {
    match rng.random_range(0..10) {
        0 => random_bytes(rng, 3),
        1 => vec![b'a'; rng.random_range(0..40)],
        2 => [
            b"ab".repeat(rng.random_range(0..20)),
            vec![rng.random_range(0..4)],
        ]
        .concat(),
        3 => format!("user{}", rng.random_range(0..100_000)).into_bytes(),
        _ => format!("user{:012}", rng.random_range(0..5_000)).into_bytes(),
    }
}

pub(crate) fn random_model(rng: &mut StdRng, keys: usize, value_len_max: usize) -> Model {
    let mut model = Model::new();
    for _ in 0..keys {
        let key = random_key(rng);
        let versions = if rng.random_range(0..8) == 0 {
            rng.random_range(1..40)
        } else {
            1
        };
        for _ in 0..versions {
            let sequence = match rng.random_range(0..50) {
                0 => rng.random(),
                1 => *[0, 1, u64::MAX, u64::MAX - 1]
                    .get(rng.random_range(0..4))
                    .unwrap(),
                _ => rng.random_range(1_000_000..1_100_000),
            };
            let compressible = rng.random_range(0..2) == 0;
            let len = rng.random_range(0..=value_len_max);
            let value = if compressible {
                vec![b'v'; len]
            } else {
                random_bytes(rng, len)
            };
            let (kind, value) = match rng.random_range(0..6) {
                0 => (EntryKind::Delete, Vec::new()),
                1 => (EntryKind::LargeValue, value),
                _ => (EntryKind::Put, value),
            };
            model.insert((key.clone(), Reverse(sequence)), (kind, value));
        }
    }
    model
}
