//! Batches that a power loss has torn.

use lightkv::{Db, WriteBatch};
use lightkv_pmem::EmulatedBacking;

use super::{Map, Medium, collect, key, put_all};

/// A key that begins with a digit.
fn in_range(digit: u8, number: u64) -> Vec<u8> {
    [&[digit][..], &key(number)].concat()
}

fn write(db: &Db, entries: &[(&[u8], &[u8])]) {
    let mut batch = WriteBatch::new();
    for (key, value) in entries {
        batch.put(*key, *value);
    }
    db.write(batch).unwrap();
}

/// A store with a pool of many partitions, whose write buffer holds everything.
fn spread(medium: &Medium) -> Db {
    let db = medium.open();
    put_all(&db, &mut Map::new(), 0..6000, 0, 20);
    assert!(db.stats().counters.splits > 4, "too few partitions");
    db
}

/// Where some bytes stand in a pool.
fn place_of(pool: &[u8], wanted: &[u8]) -> usize {
    let places: Vec<usize> = pool
        .windows(wanted.len())
        .enumerate()
        .filter(|(_, bytes)| *bytes == wanted)
        .map(|(at, _)| at)
        .collect();
    let [place] = places[..] else {
        panic!("they are {} times in the pool", places.len());
    };
    place
}

/// Whether the record of a key in a batch follows directly, and so in the same run, on the record with a value.
fn follows(medium: &Medium, value: &[u8], key: &[u8]) -> bool {
    /// Of a record in a batch, before its key.
    const HEADER_AND_EXTENSION_BYTES: usize = 48;
    const ALIGNMENT_BYTES: usize = 8;
    let pool = medium.kill_image().backing.unwrap().image();
    let value_end = place_of(&pool.bytes, value) + value.len();
    let record = value_end.next_multiple_of(ALIGNMENT_BYTES);
    place_of(&pool.bytes, key) == record + HEADER_AND_EXTENSION_BYTES
}

/// A medium whose pool has lost the record with a value.
fn without(medium: &Medium, value: &[u8]) -> Medium {
    let image = medium.kill_image();
    let mut pool = image.backing.as_ref().unwrap().image();
    let place = place_of(&pool.bytes, value);
    pool.bytes[place..place + value.len()].fill(0);
    Medium {
        backing: Some(EmulatedBacking::from_image(pool)),
        ..image
    }
}

/// On an ordinary file a power loss takes any pages of a pool: a record of one batch, and nothing of a later
/// batch that stands behind other records of the first. The scan of that run ends at the torn batch, so the
/// later one has lost a part as well and must be dropped everywhere. It was shown in part; and as the run then ended
/// there for good, the next recovery dropped the rest, which the one before had shown.
///
/// Found by power losses of ext4: a delete of a batch that one recovery had found was gone in the next.
#[test]
fn a_batch_behind_a_torn_batch_is_dropped_as_a_whole() {
    // Where the partitions are cut, and so how full their runs are, is different in each store: in one of five the later batch begins
    // a new run and is whole.
    let is_seen = (0..100).any(|_| drops_a_batch_behind_a_torn_batch(&Medium::with_pool()));
    assert!(is_seen);
}

/// False if the batches do not lie behind each other in the pool.
fn drops_a_batch_behind_a_torn_batch(medium: &Medium) -> bool {
    let db = spread(medium);
    // Keys are hexadecimal digits at random, so these are in different partitions.
    let [first, second, third] = [b'1', b'7', b'd'].map(|digit| in_range(digit, 1));
    let beside_first = [&first[..], b"-beside"].concat();
    let beside_third = [&third[..], b"-beside"].concat();
    db.put(&beside_third, b"older").unwrap();
    write(
        &db,
        &[(&first, b"torn, kept"), (&second, b"torn, lost value")],
    );
    write(&db, &[(&beside_first, b"later"), (&third, b"later, too")]);
    // And one whose loss is only due to the one before.
    write(&db, &[(&third, b"last"), (&beside_third, b"last, too")]);
    drop(db);
    if !follows(medium, b"torn, kept", &beside_first) {
        return false;
    }
    let lost = without(medium, b"torn, lost value");
    let db = lost.open();
    for key in [&first, &second, &beside_first, &third] {
        assert_eq!(db.get(key).unwrap(), None, "part of a batch is there");
    }
    assert_eq!(
        db.get(&beside_third).unwrap().as_deref(),
        Some(&b"older"[..])
    );
    let found = collect(&db);
    drop(db);
    // Neither a kill nor a further power loss changes what was found.
    assert_eq!(collect(&lost.kill_image().open()), found);
    assert_eq!(collect(&lost.crash_image(1).open()), found);
    true
}
