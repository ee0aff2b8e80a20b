//! Damaged, torn, foreign and newer files.

use lightkv_vfs::{OpenMode, VfsFile};

use super::super::super::manifest_layout::{
    FORMAT_VERSION, FileHeader, RECORD_HEADER_LEN_BYTES, RecordPlace, current_text,
};
use super::*;

const FIRST: &str = "MANIFEST-0000000001";
const COMMITS: u64 = 12;

/// A store with some commits: the states after each, and the offset at which each record ends.
fn store() -> (MemoryVfs, Vec<ManifestState>, Vec<u64>) {
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    let mut states = vec![snapshot(&manifest)];
    let mut ends = vec![manifest.len_bytes()];
    for number in 1..=COMMITS {
        manifest.commit(varied(number)).unwrap();
        states.push(snapshot(&manifest));
        ends.push(manifest.len_bytes());
    }
    (vfs, states, ends)
}

fn open(vfs: &MemoryVfs, name: &str) -> Arc<dyn VfsFile> {
    vfs.open(&directory().join(name), OpenMode::ReadWrite)
        .unwrap()
}

fn content(vfs: &MemoryVfs, name: &str) -> Vec<u8> {
    let file = open(vfs, name);
    let mut bytes = vec![0; file.len_bytes().unwrap() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn replace(vfs: &MemoryVfs, name: &str, bytes: &[u8]) {
    let path = directory().join(name);
    vfs.open(&path, OpenMode::CreateTruncate)
        .unwrap()
        .write_all_at(bytes, 0)
        .unwrap();
}

fn is_typed(error: &Error) -> bool {
    matches!(
        error,
        Error::Corruption { .. } | Error::Foreign { .. } | Error::NewerVersion { .. }
    )
}

#[test]
fn every_flipped_bit_is_an_error_and_nothing_is_touched() {
    let (vfs, ..) = store();
    for name in ["CURRENT", FIRST] {
        let file = open(&vfs, name);
        let bytes = content(&vfs, name);
        for (offset, byte) in bytes.iter().enumerate() {
            for bit in 0..8 {
                file.write_all_at(&[byte ^ (1 << bit)], offset as u64)
                    .unwrap();
                let error = match load(&vfs) {
                    Err(error) => error,
                    Ok(_) => panic!("{name}, byte {offset}, bit {bit} was not noticed"),
                };
                assert!(is_typed(&error), "{name}, byte {offset}: {error}");
                if let Error::Corruption { offset: at, .. } = error {
                    assert!(at <= offset as u64, "{name}, byte {offset}: {error}");
                }
            }
            if offset % 16 == 0 {
                let before = vfs.list(directory()).unwrap();
                assert!(Manifest::open(&shared(&vfs), directory()).is_err());
                assert_eq!(vfs.list(directory()).unwrap(), before);
            }
            file.write_all_at(&[*byte], offset as u64).unwrap();
        }
    }
    load(&vfs).unwrap().unwrap();
}

#[test]
fn a_shorter_file_is_a_prefix_of_history_or_an_error() {
    let (vfs, states, ends) = store();
    let bytes = content(&vfs, FIRST);
    for len in (0..bytes.len()).rev() {
        open(&vfs, FIRST).set_len(len as u64).unwrap();
        let whole = ends.iter().take_while(|end| **end <= len as u64).count();
        match load(&vfs) {
            Ok(found) => assert_eq!(found.as_ref(), Some(&states[whole - 1]), "{len}"),
            Err(error) => {
                assert_eq!(whole, 0, "{len}: {error}");
                assert!(is_typed(&error), "{len}: {error}");
            }
        }
    }
}

/// The last record in every shape in which a power loss can leave it, sector by sector.
#[test]
fn a_torn_last_record_is_left_out_and_never_appended_to() {
    let vfs = MemoryVfs::new();
    let manifest = create(&vfs);
    manifest.commit(varied(1)).unwrap();
    let expected = snapshot(&manifest);
    let start = manifest.len_bytes() as usize;
    let mut edit = varied(2);
    edit.added_tables[0].smallest_key = vec![1; 900];
    edit.added_tables[0].largest_key = vec![2; 900];
    manifest.commit(edit).unwrap();
    let bytes = content(&vfs, FIRST);
    let mut bounds = vec![start];
    bounds.extend((start..bytes.len()).filter(|offset| offset % 512 == 0));
    bounds.push(bytes.len());
    let sectors = bounds.len() - 1;
    assert!(sectors > 3);
    for lost in 1..1_u32 << sectors {
        for len_sectors in 1..=sectors {
            let mut torn = bytes.clone();
            for sector in (0..sectors).filter(|sector| lost >> sector & 1 == 1) {
                torn[bounds[sector]..bounds[sector + 1]].fill(0);
            }
            torn.truncate(bounds[len_sectors]);
            let image = vfs.crash_image(1);
            replace(&image, FIRST, &torn);
            assert_eq!(
                load(&image).unwrap().as_ref(),
                Some(&expected),
                "{lost:b} {len_sectors}"
            );
            let manifest = Manifest::open(&shared(&image), directory()).unwrap();
            manifest.commit(varied(3)).unwrap();
            assert_eq!(load(&image).unwrap(), Some(snapshot(&manifest)));
        }
    }
}

#[test]
fn a_hole_before_a_valid_record_is_damage() {
    let (vfs, _, ends) = store();
    let bytes = content(&vfs, FIRST);
    for pair in ends.windows(2).take(ends.len() - 2) {
        let mut holed = bytes.clone();
        holed[pair[0] as usize..pair[1] as usize].fill(0);
        replace(&vfs, FIRST, &holed);
        match load(&vfs).unwrap_err() {
            Error::Corruption { offset, .. } => assert_eq!(offset, pair[0]),
            error => panic!("{error}"),
        }
    }
}

#[test]
fn a_record_is_valid_only_where_it_was_written() {
    let (vfs, _, ends) = store();
    let mut bytes = content(&vfs, FIRST);
    // The last record once more, behind itself.
    let last = ends[ends.len() - 2] as usize..ends[ends.len() - 1] as usize;
    bytes.extend_from_within(last);
    replace(&vfs, FIRST, &bytes);
    let error = load(&vfs).unwrap_err();
    assert!(matches!(error, Error::Corruption { .. }), "{error}");
}

#[test]
fn an_older_manifest_in_place_of_the_current_one_is_noticed() {
    let (vfs, ..) = store();
    let older = content(&vfs, FIRST);
    let manifest = Manifest::open(&shared(&vfs), directory()).unwrap();
    manifest.commit(varied(COMMITS + 1)).unwrap();
    let name = manifest_files(&vfs).remove(0);
    assert_ne!(name, FIRST);
    replace(&vfs, &name, &older);
    let error = load(&vfs).unwrap_err();
    assert!(
        matches!(error, Error::Corruption { offset: 0, .. }),
        "{error}"
    );
    vfs.remove_file(&directory().join(name)).unwrap();
    let error = load(&vfs).unwrap_err();
    assert!(matches!(error, Error::Corruption { .. }), "{error}");
}

#[test]
fn a_newer_version_is_refused() {
    let (vfs, ..) = store();
    let header = FileHeader {
        store_identity: initial_state().store_identity,
        file_number: 1,
    };
    open(&vfs, FIRST)
        .write_all_at(&header.encode_version(FORMAT_VERSION + 1), 0)
        .unwrap();
    match load(&vfs).unwrap_err() {
        Error::NewerVersion {
            found, supported, ..
        } => {
            assert_eq!((found, supported), (FORMAT_VERSION + 1, FORMAT_VERSION));
        }
        error => panic!("{error}"),
    }
}

#[test]
fn directories_of_others_are_foreign() {
    for text in ["MANIFEST-000005\n".as_bytes(), &[7; 500]] {
        let vfs = MemoryVfs::new();
        vfs.create_directory(directory()).unwrap();
        replace(&vfs, "CURRENT", text);
        let error = load(&vfs).unwrap_err();
        assert!(matches!(error, Error::Foreign { .. }), "{error}");
        let error = Manifest::create(&shared(&vfs), directory(), initial_state()).unwrap_err();
        assert!(matches!(error, Error::Foreign { .. }), "{error}");
        assert_eq!(content(&vfs, "CURRENT"), text);
    }
    let vfs = MemoryVfs::new();
    vfs.create_directory(directory()).unwrap();
    replace(&vfs, "CURRENT", current_text(1).as_bytes());
    replace(&vfs, FIRST, &[b'x'; 4096]);
    let error = load(&vfs).unwrap_err();
    assert!(matches!(error, Error::Foreign { .. }), "{error}");
}

#[test]
fn a_lost_current_is_not_taken_for_an_empty_directory() {
    let (vfs, ..) = store();
    vfs.remove_file(&directory().join("CURRENT")).unwrap();
    let error = load(&vfs).unwrap_err();
    assert!(matches!(error, Error::Corruption { .. }), "{error}");
    let error = Manifest::create(&shared(&vfs), directory(), initial_state()).unwrap_err();
    assert!(matches!(error, Error::Corruption { .. }), "{error}");

    let (vfs, ..) = store();
    drop(Manifest::open(&shared(&vfs), directory()).unwrap());
    vfs.remove_file(&directory().join("CURRENT")).unwrap();
    let error = load(&vfs).unwrap_err();
    assert!(matches!(error, Error::Corruption { .. }), "{error}");
}

/// A crash can leave the new length without any of the bytes.
#[test]
fn zeros_behind_the_end_are_a_record_that_was_never_written() {
    let (vfs, states, ends) = store();
    for more in [1, 15, 16, 512, 3 << 20] {
        open(&vfs, FIRST)
            .set_len(ends[ends.len() - 1] + more)
            .unwrap();
        assert_eq!(load(&vfs).unwrap().as_ref(), states.last(), "{more}");
    }
}

/// A valid header that promises more than memory, in a sparse file that is as long.
#[test]
fn a_giant_payload_is_refused_by_its_checksum() {
    let (vfs, states, ends) = store();
    let end = ends[ends.len() - 1];
    let file_header = FileHeader {
        store_identity: states[0].store_identity,
        file_number: 1,
    };
    let place = RecordPlace {
        file: file_header,
        offset: end,
    };
    let len = 200_u32 << 20;
    let mut header = [0; RECORD_HEADER_LEN_BYTES];
    header[0..4].copy_from_slice(b"LKVr");
    header[4..8].copy_from_slice(&len.to_le_bytes());
    let checksum = lightkv_checksum::crc32c_append(place.seed(), &header[..12]);
    header[12..16].copy_from_slice(&checksum.to_le_bytes());
    let file = open(&vfs, FIRST);
    file.write_all_at(&header, end).unwrap();
    // Cut short it is torn; with something behind it, it was once whole.
    assert_eq!(load(&vfs).unwrap().as_ref(), states.last());
    file.set_len(end + u64::from(len) + 100).unwrap();
    match load(&vfs).unwrap_err() {
        Error::Corruption { offset, .. } => assert_eq!(offset, end),
        error => panic!("{error}"),
    }
}
