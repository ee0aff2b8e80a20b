//! Body of the fuzz target of journal files; `docs/internals/fuzzing.md` tells how it is run.

use std::path::Path;
use std::sync::Arc;

use lightkv_vfs::{MemoryVfs, OpenMode, Vfs};

use crate::file_index::{CRC_AT, FileIndex, INDEX_HEADER_LEN_BYTES, checksum, word};
use crate::file_pool::file_name;
use crate::journal_layout::{
    ENTRY_HEADER_LEN_BYTES, EntryHeader, EntrySeed, FILE_HEADER_LEN_BYTES, FileHeader, MAGIC,
    SEAL_PAYLOAD_LEN_BYTES, entry_len_bytes, u64_at,
};
use crate::position::JournalPosition;
use crate::staging::staging_name;
use crate::{Journal, JournalOptions, Recovered, Truncation};

const IDENTITY: u64 = 0x1234;
const DIRECTORY: &str = "journal";
/// The part of a header page that is not zero.
const FIELDS_LEN_BYTES: usize = 48;
/// Bytes before the files: flags, length of the first file, end of the truncation.
const HEAD_LEN_BYTES: usize = 5;

/// The checksums of the input are replaced by right ones.
const SEALED: u8 = 1;
/// The manifest has a truncation of the first file.
const TRUNCATED: u8 = 2;
/// The header's capacity is what it says, not the length of the file.
const OWN_CAPACITY: u8 = 4;
/// Everything is synced and read anew.
const DISTRUSTED: u8 = 8;
/// The second file is a staging file.
const STAGED: u8 = 16;

/// A file: the fields of its header, and its entries.
fn file(generation: u64, payloads: &[&[u8]], sealed_to: Option<u64>) -> Vec<u8> {
    let seed = EntrySeed::new(IDENTITY, generation);
    let mut entries = Vec::new();
    let mut add = |payload: &[u8], is_seal: bool, sequence: u64| {
        let offset = (FILE_HEADER_LEN_BYTES + entries.len()) as u64;
        let header = EntryHeader {
            is_seal,
            payload_len: payload.len() as u32,
            payload_crc: lightkv_checksum::crc32c(payload),
            sequence_count: u32::from(!is_seal),
            first_sequence: sequence,
            synced: JournalPosition::known(generation, offset),
        };
        entries.extend_from_slice(&header.encode(seed, offset));
        entries.extend_from_slice(payload);
        entries.resize(entries.len().next_multiple_of(8), 0);
    };
    for (number, payload) in payloads.iter().enumerate() {
        add(payload, false, generation * 100 + number as u64);
    }
    if let Some(next) = sealed_to {
        add(&next.to_le_bytes(), true, 0);
    }
    let header = FileHeader {
        store_identity: IDENTITY,
        generation,
        capacity_bytes: (FILE_HEADER_LEN_BYTES + entries.len()) as u64,
    };
    [&header.encode()[..FIELDS_LEN_BYTES], &entries].concat()
}

/// One and two files, with and without a truncation, and one whose last entries are in staging.
pub fn journal_file_seeds() -> Vec<Vec<u8>> {
    let seed = |flags: u8, cut: u16, first: &[u8], second: &[u8]| {
        let len = first.len() as u16;
        [
            &[flags][..],
            &len.to_le_bytes(),
            &cut.to_le_bytes(),
            first,
            second,
        ]
        .concat()
    };
    let payloads: [&[u8]; 4] = [b"first", b"", &[7; 100], b"the last one"];
    let first = file(1, &payloads, None);
    let sealed = file(1, &payloads[..2], Some(2));
    let second = file(2, &payloads[1..], None);
    let mut unwritten = first.clone();
    unwritten[FIELDS_LEN_BYTES + 40 + 32..].fill(0);
    let cut = ((FILE_HEADER_LEN_BYTES + 40 + 32) / 8) as u16;
    vec![
        seed(SEALED, 0, &first, &[]),
        seed(SEALED | DISTRUSTED, 0, &sealed, &second),
        seed(SEALED | TRUNCATED, cut, &first, &second),
        seed(SEALED | OWN_CAPACITY, 0, &sealed, &first),
        seed(0, 0, &sealed, &second),
        seed(STAGED, 0, &unwritten, &first),
        seed(STAGED | SEALED | DISTRUSTED, 0, &unwritten, &first),
    ]
}

/// The bytes of a file, from the fields of its header and its entries.
fn whole_file(flags: u8, part: &[u8]) -> Vec<u8> {
    let mut fields = [0; FIELDS_LEN_BYTES];
    let present = part.len().min(FIELDS_LEN_BYTES);
    fields[..present].copy_from_slice(&part[..present]);
    let mut bytes = vec![0; FILE_HEADER_LEN_BYTES];
    bytes[..FIELDS_LEN_BYTES].copy_from_slice(&fields);
    bytes.extend_from_slice(&part[present..]);
    if flags & SEALED != 0 && fields[..8] == MAGIC {
        seal(&mut bytes, flags & OWN_CAPACITY == 0);
    }
    bytes
}

/// Puts all checksums right, and the capacity if asked to, but what is no header stays none.
fn seal(bytes: &mut [u8], sets_capacity: bool) {
    let len_bytes = bytes.len() as u64;
    let header = FileHeader {
        store_identity: u64_at(bytes, 16),
        generation: u64_at(bytes, 24),
        capacity_bytes: if sets_capacity {
            len_bytes
        } else {
            u64_at(bytes, 32)
        },
    };
    let version: [u8; 4] = *bytes[8..].first_chunk().expect("a whole page");
    bytes[..FILE_HEADER_LEN_BYTES].copy_from_slice(&header.encode());
    bytes[8..12].copy_from_slice(&version);
    let seed = EntrySeed::new(header.store_identity, header.generation);
    let mut at = FILE_HEADER_LEN_BYTES;
    while let Some(head) = bytes.get(at..at + ENTRY_HEADER_LEN_BYTES) {
        let word = |from: usize| u32::from_le_bytes(*head[from..].first_chunk().expect("32 bytes"));
        let payload_len = word(4) & !(1 << 31);
        let payload_at = at + ENTRY_HEADER_LEN_BYTES;
        let Some(payload) = bytes.get(payload_at..payload_at + payload_len as usize) else {
            return;
        };
        let header = EntryHeader {
            is_seal: word(4) >> 31 != 0,
            payload_len,
            payload_crc: lightkv_checksum::crc32c(payload),
            sequence_count: word(12),
            first_sequence: u64_at(head, 16),
            synced: JournalPosition::from_u64(u64_at(head, 24)),
        };
        let encoded = header.encode(seed, at as u64);
        bytes[at..payload_at].copy_from_slice(&encoded);
        at += entry_len_bytes(u64::from(payload_len)) as usize;
        if header.is_seal && payload_len as usize == SEAL_PAYLOAD_LEN_BYTES {
            return;
        }
    }
}

/// The entries of history: position, first sequence number, how many, and the payload.
type History = Vec<(u64, u64, u32, Vec<u8>)>;

fn replay(recovered: &mut Recovered) -> Option<History> {
    let mut history = History::new();
    recovered
        .replay(|entry| {
            assert!(entry.position < entry.end && entry.sequence_count > 0);
            assert_eq!(entry.position.generation(), entry.end.generation());
            let count = u64::from(entry.sequence_count);
            assert!(entry.first_sequence.checked_add(count).is_some());
            history.push((
                entry.position.to_u64(),
                entry.first_sequence,
                entry.sequence_count,
                entry.payload.to_vec(),
            ));
            Ok::<(), ()>(())
        })
        .ok()?;
    Some(history)
}

/// Up to two journal files, or one and its staging: refused, or replayed to an end, each entry once, in the order of their places,
/// and the same again by threads that take batches.
pub fn journal_file(input: &[u8]) {
    let Some((head, rest)) = input.split_first_chunk::<HEAD_LEN_BYTES>() else {
        return;
    };
    let [flags, len_low, len_high, cut_low, cut_high] = *head;
    let first_len = usize::from(u16::from_le_bytes([len_low, len_high]));
    let (first, second) = rest.split_at(first_len.min(rest.len()));
    let vfs = MemoryVfs::new();
    let directory = Path::new(DIRECTORY);
    vfs.create_directory(directory).expect("in memory");
    let write = |name: &str, bytes: &[u8]| {
        let file = vfs.open(&directory.join(name), OpenMode::CreateNew);
        file.and_then(|file| file.write_all_at(bytes, 0))
            .expect("in memory");
    };
    write(&file_name(1), &whole_file(flags, first));
    if !second.is_empty() {
        let name = match flags & STAGED {
            0 => file_name(2),
            _ => staging_name(0),
        };
        write(&name, &whole_file(flags, second));
    }
    if flags & DISTRUSTED != 0 {
        write(crate::file_pool::SYNC_FAILED_NAME, b"");
    }
    let truncations = [Truncation {
        generation: 1,
        end_offset: u64::from(u16::from_le_bytes([cut_low, cut_high])) * 8,
        next_generation: 2,
    }];
    let options = JournalOptions {
        first_live_generation: 1,
        truncations: &truncations[..usize::from(flags & TRUNCATED != 0)],
        ..JournalOptions::new(IDENTITY)
    };
    let vfs: Arc<dyn Vfs> = Arc::new(vfs);
    let Ok(mut recovered) = Journal::open(vfs, directory, options) else {
        return;
    };
    let history = replay(&mut recovered);
    if let Some(history) = &history {
        assert!(
            history.is_sorted_by(|(before, ..), (after, ..)| before < after),
            "an entry comes twice, or too early"
        );
        let total: usize = history.iter().map(|(.., payload)| payload.len()).sum();
        assert!(total <= input.len(), "more is replayed than there is");
    }
    assert_eq!(replay(&mut recovered), history, "a second time");
}

/// Indexes with and without words, of a whole file and of a damaged one.
pub fn journal_index_seeds() -> Vec<Vec<u8>> {
    let index = FileIndex {
        store_identity: IDENTITY,
        generation: 3,
        is_damaged: false,
        mount_identity: 7,
        end_offset: 60_000,
        next_generation: 4,
        last_sequence: 300,
        synced: JournalPosition::known(2, 4096),
        words: (0..20)
            .map(|number| word(number / 3, 4096 + 8 * u64::from(number)))
            .collect(),
    };
    let empty = FileIndex {
        words: Vec::new(),
        is_damaged: true,
        ..index.clone()
    };
    vec![index.encode(), empty.encode()]
}

/// The index of a journal file, as it is and with the checksum that it should have: refused, or written again as it was, and its words lead
/// where they say.
pub fn journal_index(input: &[u8]) {
    let mut sealed = input.to_vec();
    if sealed.len() >= INDEX_HEADER_LEN_BYTES {
        let crc = checksum(&sealed);
        sealed[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }
    for bytes in [input, &sealed] {
        let Some(index) = FileIndex::decode(bytes) else {
            continue;
        };
        assert!(
            bytes.starts_with(&index.encode()),
            "something else is written"
        );
        for &found in &index.words {
            let mut offsets = index.offsets_of((found >> 32) as u32);
            let offset = (found & u64::from(u32::MAX)) * 8;
            assert!(offsets.any(|other| other == offset), "it is not found");
        }
    }
}
