//! What other crates' crash tests rely on: that this file system loses what a disk may lose, and
//! nothing else.

use std::collections::HashSet;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Fault, FaultKind, FileLock, Mapping, MemoryVfs, OpenMode, Operation, Vfs, VfsFile};

/// Enough to see every kind of draw.
const SEEDS: std::ops::Range<u64> = 0..200;

fn path(name: &str) -> PathBuf {
    Path::new("/").join(name)
}

fn create(vfs: &MemoryVfs, name: &str) -> Arc<dyn VfsFile> {
    vfs.open(&path(name), OpenMode::CreateNew).unwrap()
}

/// A file whose bytes and name are durable.
fn create_durable(vfs: &MemoryVfs, name: &str, bytes: &[u8]) -> Arc<dyn VfsFile> {
    let file = create(vfs, name);
    file.write_all_at(bytes, 0).unwrap();
    file.sync_data().unwrap();
    vfs.sync_directory(Path::new("/")).unwrap();
    file
}

fn read(vfs: &MemoryVfs, name: &str) -> io::Result<Vec<u8>> {
    let file = vfs.open(&path(name), OpenMode::Read)?;
    let mut bytes = vec![0; file.len_bytes()? as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

fn store(mapping: &dyn Mapping, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= mapping.len());
    // SAFETY: In range by the assertion; no other thread uses the mapping in these tests.
    unsafe {
        let target = mapping.as_ptr().add(offset);
        target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
    }
}

fn fault(operation: Operation, kind: FaultKind) -> Fault {
    Fault {
        operation,
        kind,
        after_calls: 0,
        permanent: false,
        path_contains: None,
    }
}

#[test]
fn opens_like_a_real_file_system() {
    let vfs = MemoryVfs::new();
    let kind = |name, mode| vfs.open(&path(name), mode).unwrap_err().kind();
    assert_eq!(kind("file", OpenMode::Read), ErrorKind::NotFound);
    assert_eq!(kind("file", OpenMode::ReadWrite), ErrorKind::NotFound);
    assert_eq!(kind("none/file", OpenMode::CreateNew), ErrorKind::NotFound);
    let file = create(&vfs, "file");
    file.write_all_at(b"hello", 3).unwrap();
    assert_eq!(kind("file", OpenMode::CreateNew), ErrorKind::AlreadyExists);
    assert_eq!(read(&vfs, "file").unwrap(), b"\0\0\0hello");
    let reader = vfs.open(&path("file"), OpenMode::Read).unwrap();
    assert!(reader.write_all_at(b"x", 0).is_err());
    assert!(reader.set_len(0).is_err());
    let past_end = reader.read_exact_at(&mut [0; 6], 3).unwrap_err();
    assert_eq!(past_end.kind(), ErrorKind::UnexpectedEof);
    let overflow = reader.read_exact_at(&mut [0; 6], u64::MAX - 2).unwrap_err();
    assert_eq!(overflow.kind(), ErrorKind::UnexpectedEof);
    vfs.open(&path("file"), OpenMode::CreateTruncate).unwrap();
    assert_eq!(reader.len_bytes().unwrap(), 0);
}

#[test]
fn lengths_and_zeros_are_like_on_a_real_file_system() {
    let vfs = MemoryVfs::new();
    for is_mapped in [false, true] {
        let name = if is_mapped { "mapped" } else { "plain" };
        let file = create(&vfs, name);
        file.write_all_at(&[7; 1000], 0).unwrap();
        let _mapping = is_mapped.then(|| file.map(1000, false).unwrap());
        file.set_len(400).unwrap();
        file.set_len(1000).unwrap();
        let bytes = read(&vfs, name).unwrap();
        assert_eq!(bytes[..400], [7; 400]);
        assert_eq!(bytes[400..], [0; 600], "truncated bytes do not come back");
        file.allocate(100).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 1000, "never shrinks");
        file.allocate(3000).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 3000);
        let huge = file.set_len(1 << 60).unwrap_err();
        assert_eq!(huge.kind(), ErrorKind::StorageFull);
    }
}

#[test]
fn unsynced_bytes_can_be_lost_kept_and_torn_at_sectors() {
    let vfs = MemoryVfs::new();
    let file = create_durable(&vfs, "file", &[1; 4096]);
    file.write_all_at(&[2; 4096], 0).unwrap();
    assert_eq!(read(&vfs.crash_image(0), "file").unwrap(), [1; 4096]);
    assert_eq!(read(&vfs.crash_image(1), "file").unwrap(), [2; 4096]);
    let mut seen = HashSet::new();
    for seed in SEEDS {
        let bytes = read(&vfs.crash_image(seed), "file").unwrap();
        let mut mask = 0u8;
        for (sector, bytes) in bytes.chunks(512).enumerate() {
            assert!(
                bytes.iter().all(|&byte| byte == bytes[0]),
                "sectors are atomic"
            );
            mask |= u8::from(bytes[0] == 2) << sector;
        }
        seen.insert(mask);
        assert_eq!(read(&vfs.crash_image(seed), "file").unwrap(), bytes);
    }
    assert!(seen.len() > 20, "only {} different images", seen.len());
    file.sync_data().unwrap();
    for seed in SEEDS {
        assert_eq!(read(&vfs.crash_image(seed), "file").unwrap(), [2; 4096]);
    }
}

#[test]
fn unsynced_lengths_can_be_lost_and_kept() {
    let vfs = MemoryVfs::new();
    let file = create_durable(&vfs, "file", &[1; 1000]);
    file.write_all_at(&[2; 3000], 1000).unwrap();
    let lens: HashSet<_> = SEEDS
        .map(|seed| read(&vfs.crash_image(seed), "file").unwrap().len())
        .collect();
    assert!(lens.contains(&1000) && lens.contains(&4000) && lens.len() > 3);
    file.set_len(10).unwrap();
    for seed in SEEDS {
        let bytes = read(&vfs.crash_image(seed), "file").unwrap();
        assert!(
            bytes.iter().all(|&byte| byte == 1),
            "truncated bytes return as they were"
        );
    }
    file.sync_data().unwrap();
    assert_eq!(read(&vfs.crash_image(0), "file").unwrap().len(), 10);
}

#[test]
fn names_are_lost_until_the_directory_is_synced() {
    let vfs = MemoryVfs::new();
    vfs.create_directory(&path("a/b")).unwrap();
    let file = create(&vfs, "a/b/file");
    file.write_all_at(b"bytes", 0).unwrap();
    file.sync_data().unwrap();
    assert!(!vfs.crash_image(0).exists(&path("a")).unwrap());
    assert_eq!(read(&vfs.crash_image(1), "a/b/file").unwrap(), b"bytes");
    vfs.sync_directory(&path("a/b")).unwrap();
    assert!(
        !vfs.crash_image(0).exists(&path("a")).unwrap(),
        "its parents count"
    );
    vfs.sync_directory(&path("a")).unwrap();
    vfs.sync_directory(Path::new("/")).unwrap();
    assert_eq!(read(&vfs.crash_image(0), "a/b/file").unwrap(), b"bytes");
    vfs.remove_file(&path("a/b/file")).unwrap();
    assert_eq!(read(&vfs.crash_image(0), "a/b/file").unwrap(), b"bytes");
    assert!(!vfs.crash_image(1).exists(&path("a/b/file")).unwrap());
}

#[test]
fn a_durable_name_does_not_make_content_durable() {
    let vfs = MemoryVfs::new();
    create(&vfs, "file").write_all_at(b"bytes", 0).unwrap();
    vfs.sync_directory(Path::new("/")).unwrap();
    assert_eq!(read(&vfs.crash_image(0), "file").unwrap(), b"");
}

#[test]
fn a_rename_replaces_atomically() {
    let vfs = MemoryVfs::new();
    create_durable(&vfs, "current", b"old");
    create_durable(&vfs, "temporary", b"new");
    vfs.rename(&path("temporary"), &path("current")).unwrap();
    let mut seen = HashSet::new();
    for seed in SEEDS {
        let image = vfs.crash_image(seed);
        let current = read(&image, "current").unwrap();
        let is_temporary_left = image.exists(&path("temporary")).unwrap();
        assert_eq!(current == b"old", is_temporary_left);
        seen.insert(current);
    }
    assert_eq!(seen.len(), 2, "both outcomes occur");
    vfs.sync_directory(Path::new("/")).unwrap();
    assert_eq!(read(&vfs.crash_image(0), "current").unwrap(), b"new");
}

#[test]
fn directory_changes_survive_as_a_prefix() {
    let vfs = MemoryVfs::new();
    for number in 0..6 {
        create(&vfs, &number.to_string());
    }
    let mut seen = HashSet::new();
    for seed in SEEDS {
        let count = vfs.crash_image(seed).list(Path::new("/")).unwrap().len();
        for number in 0..6 {
            let exists = vfs.crash_image(seed).exists(&path(&number.to_string()));
            assert_eq!(exists.unwrap(), number < count);
        }
        seen.insert(count);
    }
    assert_eq!(seen.len(), 7);
}

#[test]
fn a_file_moved_between_directories_is_never_lost() {
    let vfs = MemoryVfs::new();
    for name in ["a", "b", "c"] {
        vfs.create_directory(&path(name)).unwrap();
    }
    create_durable(&vfs, "a/file", b"bytes");
    vfs.sync_directory(&path("a")).unwrap();
    vfs.rename(&path("a/file"), &path("b/file")).unwrap();
    vfs.rename(&path("b/file"), &path("c/file")).unwrap();
    for synced in ["", "a", "b"] {
        if !synced.is_empty() {
            vfs.sync_directory(&path(synced)).unwrap();
        }
        for seed in SEEDS {
            let image = vfs.crash_image(seed);
            let found = ["a/file", "b/file", "c/file"]
                .iter()
                .filter(|name| image.exists(&path(name)).unwrap())
                .count();
            assert!(found > 0, "seed {seed} after syncing {synced:?}");
        }
    }
}

#[test]
fn hard_links_are_one_file_also_in_images() {
    let vfs = MemoryVfs::new();
    create_durable(&vfs, "one", b"bytes");
    vfs.hard_link(&path("one"), &path("two")).unwrap();
    assert!(vfs.hard_link(&path("one"), &path("two")).is_err());
    vfs.sync_directory(Path::new("/")).unwrap();
    for image in [vfs.crash_image(0), vfs.kill_image()] {
        let file = image.open(&path("one"), OpenMode::ReadWrite).unwrap();
        file.write_all_at(b"BY", 0).unwrap();
        image.remove_file(&path("one")).unwrap();
        assert_eq!(read(&image, "two").unwrap(), b"BYtes");
    }
    assert_eq!(read(&vfs, "two").unwrap(), b"bytes", "images are copies");
}

#[test]
fn mapped_stores_are_seen_at_once_and_durable_after_a_sync() {
    let vfs = MemoryVfs::new();
    let file = create_durable(&vfs, "file", &[1; 12288]);
    let mapping = file.map(12288, true).unwrap();
    assert_eq!(mapping.as_ptr().addr() % 4096, 0);
    store(&*mapping, 100, b"abc");
    store(&*mapping, 5000, b"def");
    let mut bytes = [0; 3];
    file.read_exact_at(&mut bytes, 5000).unwrap();
    assert_eq!(&bytes, b"def");
    file.write_all_at(b"xyz", 200).unwrap();
    // SAFETY: In range; no other thread uses the mapping.
    assert_eq!(unsafe { mapping.as_ptr().add(200).read() }, b'x');
    assert_eq!(
        read(&vfs.kill_image(), "file").unwrap()[5000..5003],
        *b"def"
    );
    assert_eq!(read(&vfs.crash_image(0), "file").unwrap(), [1; 12288]);
    file.sync_data().unwrap();
    drop(file);
    drop(mapping);
    assert_eq!(
        read(&vfs.crash_image(0), "file").unwrap()[5000..5003],
        *b"def"
    );
}

#[test]
fn pointers_stay_valid_while_a_mapped_file_grows_and_goes() {
    let vfs = MemoryVfs::new();
    let file = create(&vfs, "file");
    file.allocate(4096).unwrap();
    let mapping = file.map(4096, false).unwrap();
    file.allocate(1 << 15).unwrap();
    let larger = file.map(1 << 15, false).unwrap();
    assert_eq!(mapping.as_ptr(), larger.as_ptr());
    assert!(file.map((1 << 15) + 1, false).is_err());
    let too_far = file.allocate(1 << 30).unwrap_err();
    assert_eq!(too_far.kind(), ErrorKind::Unsupported);
    vfs.remove_file(&path("file")).unwrap();
    drop(file);
    store(&*mapping, 0, b"still there");
}

#[test]
fn death_of_the_process_keeps_unsynced_unsynced() {
    let vfs = MemoryVfs::new();
    let file = create_durable(&vfs, "file", b"old");
    file.write_all_at(b"new", 0).unwrap();
    create(&vfs, "other");
    let image = vfs.kill_image();
    assert_eq!(read(&image, "file").unwrap(), b"new");
    assert!(image.exists(&path("other")).unwrap());
    let lost = image.crash_image(0);
    assert_eq!(read(&lost, "file").unwrap(), b"old");
    assert!(!lost.exists(&path("other")).unwrap());
}

#[test]
fn a_failed_sync_drops_the_data_for_good() {
    let vfs = MemoryVfs::new();
    let file = create_durable(&vfs, "file", &[1; 2048]);
    file.write_all_at(&[2; 1024], 0).unwrap();
    vfs.inject(fault(Operation::SyncData, FaultKind::Io));
    assert!(file.sync_data().is_err());
    file.sync_data().expect("the kernel reports an error once");
    assert_eq!(read(&vfs, "file").unwrap()[..1024], [2; 1024]);
    assert_eq!(read(&vfs.crash_image(0), "file").unwrap(), [1; 2048]);
    // Writing something else there makes it dirty again.
    file.write_all_at(&[3; 512], 0).unwrap();
    file.sync_data().unwrap();
    let survivor = read(&vfs.crash_image(0), "file").unwrap();
    assert_eq!((survivor[0], survivor[512]), (3, 1));
    // Out of the cache the medium shows.
    file.drop_from_cache(0, 2048).unwrap();
    assert_eq!(read(&vfs, "file").unwrap(), survivor);
}

#[test]
fn what_a_failed_sync_dropped_of_a_new_file_reads_as_zeros() {
    let vfs = MemoryVfs::new();
    let file = create_durable(&vfs, "file", &[]);
    file.write_all_at(&[2; 2048], 0).unwrap();
    vfs.inject(fault(Operation::SyncData, FaultKind::NoSpace));
    assert!(file.sync_data().is_err());
    file.drop_from_cache(0, 2048).unwrap();
    assert_eq!(read(&vfs, "file").unwrap(), [0; 2048]);
}

#[test]
fn what_a_failed_sync_dropped_ends_with_the_file() {
    for (len_bytes, kept) in [(0, vec![]), (512, vec![1; 512]), (700, vec![1; 700])] {
        let vfs = MemoryVfs::new();
        let file = create_durable(&vfs, "file", &[1; 2048]);
        file.write_all_at(&[2; 2048], 0).unwrap();
        vfs.inject(fault(Operation::SyncData, FaultKind::Io));
        assert!(file.sync_data().is_err());
        file.set_len(len_bytes).unwrap();
        let shorter = vfs.kill_image();
        let shorter_file = shorter.open(&path("file"), OpenMode::ReadWrite).unwrap();
        shorter_file.drop_from_cache(0, 2048).unwrap();
        assert_eq!(read(&shorter, "file").unwrap(), kept);
        // What grows there is new.
        file.set_len(2048).unwrap();
        file.drop_from_cache(0, 2048).unwrap();
        let mut grown = kept;
        grown.resize(2048, 0);
        assert_eq!(read(&vfs, "file").unwrap(), grown);
        file.sync_data().unwrap();
        assert_eq!(read(&vfs.crash_image(0), "file").unwrap(), grown);
    }
}

#[test]
fn faults_follow_their_plan() {
    let vfs = MemoryVfs::new();
    let file = create(&vfs, "file");
    let other = create(&vfs, "other");
    vfs.inject(Fault {
        after_calls: 1,
        path_contains: Some("file".to_string()),
        ..fault(Operation::Write, FaultKind::Io)
    });
    other.write_all_at(b"x", 0).unwrap();
    file.write_all_at(b"x", 0).unwrap();
    let error = file.write_all_at(b"y", 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    file.write_all_at(b"z", 0).unwrap();
    vfs.inject(Fault {
        permanent: true,
        ..fault(Operation::Write, FaultKind::NoSpace)
    });
    for _ in 0..3 {
        let error = other.write_all_at(b"y", 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
    }
    assert_eq!(vfs.calls(Operation::Write), 7);
    assert_eq!(read(&vfs, "other").unwrap(), b"x", "no effect");
    vfs.clear_faults();
    vfs.inject(fault(Operation::Write, FaultKind::ShortWrite));
    let error = other.write_all_at(b"123456", 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WriteZero);
    assert_eq!(read(&vfs, "other").unwrap(), b"123");
}

#[test]
fn every_operation_can_fail() {
    type Call = fn(&MemoryVfs, &Arc<dyn VfsFile>) -> io::Result<()>;
    let calls: [(Operation, Call); 14] = [
        (Operation::Open, |vfs, _| {
            vfs.open(&path("new"), OpenMode::CreateNew).map(drop)
        }),
        (Operation::Read, |_, file| file.read_exact_at(&mut [0], 0)),
        (Operation::Write, |_, file| file.write_all_at(b"x", 0)),
        (Operation::Allocate, |_, file| file.allocate(9000)),
        (Operation::SetLen, |_, file| file.set_len(9000)),
        (Operation::SyncData, |_, file| file.sync_data()),
        (Operation::SyncDirectory, |vfs, _| {
            vfs.sync_directory(Path::new("/"))
        }),
        (Operation::Rename, |vfs, _| {
            vfs.rename(&path("file"), &path("renamed"))
        }),
        (Operation::Remove, |vfs, _| vfs.remove_file(&path("file"))),
        (Operation::HardLink, |vfs, _| {
            vfs.hard_link(&path("file"), &path("link"))
        }),
        (Operation::List, |vfs, _| vfs.list(Path::new("/")).map(drop)),
        (Operation::Map, |_, file| file.map(1, false).map(drop)),
        (Operation::CreateDirectory, |vfs, _| {
            vfs.create_directory(&path("directory"))
        }),
        (Operation::Lock, |vfs, _| vfs.lock(&path("LOCK")).map(drop)),
    ];
    for (operation, call) in calls {
        let vfs = MemoryVfs::new();
        let file = create(&vfs, "file");
        file.write_all_at(b"bytes", 0).unwrap();
        let before = vfs.calls(operation);
        vfs.inject(fault(operation, FaultKind::Io));
        assert!(call(&vfs, &file).is_err(), "{operation:?}");
        assert_eq!(vfs.calls(operation), before + 1);
        assert_eq!(
            vfs.list(Path::new("/")).unwrap().len(),
            1,
            "{operation:?} had an effect"
        );
        assert_eq!(read(&vfs, "file").unwrap(), b"bytes");
        call(&vfs, &file).unwrap();
    }
}

#[test]
fn capacity_limits_writes_and_allocations() {
    let vfs = MemoryVfs::new();
    let file = create(&vfs, "file");
    vfs.set_capacity_bytes(Some(1000));
    let error = file.write_all_at(&[1; 1500], 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert_eq!(file.len_bytes().unwrap(), 1000, "what fits is written");
    file.write_all_at(&[2; 1000], 0)
        .expect("overwriting needs no space");
    assert_eq!(vfs.available_bytes(Path::new("/")).unwrap(), 0);
    let other = create(&vfs, "other");
    assert!(other.allocate(1).is_err());
    assert_eq!(other.len_bytes().unwrap(), 0);
    vfs.remove_file(&path("file")).unwrap();
    assert!(other.allocate(1).is_err(), "an open file keeps its space");
    drop(file);
    other.allocate(1000).unwrap();
    other.set_len(400).unwrap();
    assert_eq!(vfs.available_bytes(Path::new("/")).unwrap(), 600);
    vfs.set_capacity_bytes(None);
    other.allocate(5000).unwrap();
}

#[test]
fn locks_exclude_each_other_and_die_with_the_process() {
    let vfs = MemoryVfs::new();
    let guard: Box<dyn FileLock> = vfs.lock(&path("LOCK")).unwrap();
    vfs.hard_link(&path("LOCK"), &path("alias")).unwrap();
    for name in ["LOCK", "./LOCK", "alias"] {
        let error = vfs.clone().lock(&path(name)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
    }
    vfs.kill_image().lock(&path("LOCK")).unwrap();
    drop(guard);
    vfs.lock(&path("alias")).unwrap();
}

#[test]
fn directories_behave() {
    let vfs = MemoryVfs::new();
    vfs.create_directory(&path("a/b")).unwrap();
    vfs.create_directory(&path("a/b")).unwrap();
    create(&vfs, "a/file").write_all_at(&[0; 9], 0).unwrap();
    let mut entries = vfs.list(&path("a")).unwrap();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(entries.len(), 2);
    assert!(entries[0].is_directory && entries[0].len_bytes == 0);
    assert!(!entries[1].is_directory && entries[1].len_bytes == 9);
    let kind = |outcome: io::Result<()>| outcome.unwrap_err().kind();
    assert_eq!(kind(vfs.list(&path("x")).map(drop)), ErrorKind::NotFound);
    assert_eq!(kind(vfs.sync_directory(&path("x"))), ErrorKind::NotFound);
    assert_eq!(kind(vfs.remove_file(&path("a/b"))), ErrorKind::IsADirectory);
    assert_eq!(
        kind(vfs.create_directory(&path("a/file"))),
        ErrorKind::AlreadyExists
    );
    assert!(vfs.exists(&path("a/b/../file")).unwrap());
    vfs.rename(&path("a"), &path("c")).unwrap();
    assert!(vfs.exists(&path("c/file")).unwrap());
}
