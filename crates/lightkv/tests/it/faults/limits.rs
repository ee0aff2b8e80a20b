//! Keys, values and batches on both sides of each limit.

use lightkv::{
    Db, Error, KEY_LEN_MAX_BYTES, Options, VALUE_LEN_MAX_BYTES, WriteBatch, WriteOptions,
};

use super::{Model, check, small_options};

fn open(options: Options) -> (tempfile::TempDir, Db) {
    let directory = tempfile::tempdir().unwrap();
    let db = options.open(directory.path()).unwrap();
    (directory, db)
}

#[test]
fn empty_and_longest_keys_work_and_longer_ones_are_refused() {
    for options in [small_options(), Options::new().memory_budget(16 << 20)] {
        let (directory, db) = open(options.clone());
        let longest = vec![b'k'; KEY_LEN_MAX_BYTES];
        let too_long = vec![b'k'; KEY_LEN_MAX_BYTES + 1];
        let refused = |result: lightkv::Result<()>| {
            let error = result.unwrap_err();
            assert!(
                matches!(error, Error::KeyTooLarge { len_bytes, limit_bytes }
                    if len_bytes == KEY_LEN_MAX_BYTES + 1 && limit_bytes == KEY_LEN_MAX_BYTES),
                "{error}"
            );
        };
        db.put("", "empty key").unwrap();
        db.put(&longest, "longest key").unwrap();
        db.put([&longest[1..], b"a"].concat(), "almost the same")
            .unwrap();
        db.put("empty value", "").unwrap();
        refused(db.put(&too_long, "v"));
        refused(db.delete(&too_long));
        let mut batch = WriteBatch::new();
        batch.put("not", "written").put(&too_long, "v");
        refused(db.write(batch));
        let mut batch = WriteBatch::new();
        batch.put("not", "written").delete(&too_long);
        refused(db.write_with(batch, WriteOptions::new().sync(true)));
        let mut model: Model = [
            (Vec::new(), b"empty key".to_vec()),
            (longest.clone(), b"longest key".to_vec()),
            ([&longest[1..], b"a"].concat(), b"almost the same".to_vec()),
            (b"empty value".to_vec(), Vec::new()),
        ]
        .into();
        let check_all = |db: &Db, model: &Model| {
            check(db, model);
            assert_eq!(db.get(&too_long).unwrap(), None);
            assert_eq!(db.prefix(&too_long).count(), 0);
            assert_eq!(db.scan(&too_long[..]..).count(), 0);
            assert_eq!(db.prefix("").count(), model.len());
        };
        check_all(&db, &model);
        drop(db);
        let db = options.clone().open(directory.path()).unwrap();
        check_all(&db, &model);
        db.flush().unwrap();
        check_all(&db, &model);
        db.compact(..).unwrap();
        db.delete("").unwrap();
        db.delete(&longest).unwrap();
        model.remove(&b""[..]);
        model.remove(&longest);
        check_all(&db, &model);
        db.compact(..).unwrap();
        check_all(&db, &model);
        db.verify().unwrap();
        db.close().unwrap();
    }
}

#[test]
fn many_long_keys_that_differ_at_their_ends_only_work() {
    let (directory, db) = open(small_options());
    let mut model = Model::new();
    for number in 0..40_u8 {
        let mut key = vec![b'p'; 20_000];
        key.push(number);
        db.put(&key, [number]).unwrap();
        model.insert(key, vec![number]);
    }
    check(&db, &model);
    drop(db);
    let db = small_options().open(directory.path()).unwrap();
    check(&db, &model);
    db.compact(..).unwrap();
    check(&db, &model);
    db.verify().unwrap();
}

/// Around every size at which values are stored in another way, with the smallest budget.
#[test]
fn values_of_all_lengths_work() {
    let options = Options::new().memory_budget(16 << 20);
    let (directory, db) = open(options.clone());
    let mut model = Model::new();
    let mebibyte = 1 << 20;
    let around = [512 << 10, mebibyte];
    let mut lengths = vec![0, 1, 4095, 4096, 4097, 65_536, 300_000, 3 * mebibyte + 1];
    lengths.extend(
        around
            .iter()
            .flat_map(|&at| [at - 300, at - 64, at - 1, at, at + 1]),
    );
    for len_bytes in lengths {
        let value: Vec<u8> = (0..len_bytes)
            .map(|at: usize| ((at * 31) >> 3) as u8)
            .collect();
        let key = format!("{len_bytes:010}").into_bytes();
        db.put(&key, &value)
            .unwrap_or_else(|error| panic!("{len_bytes} bytes: {error}"));
        let mut batch = WriteBatch::new();
        batch
            .put([&key[..], b"b"].concat(), &value)
            .put([&key[..], b"c"].concat(), b"beside");
        db.write(batch)
            .unwrap_or_else(|error| panic!("{len_bytes} bytes in a batch: {error}"));
        model.insert([&key[..], b"b"].concat(), value.clone());
        model.insert([&key[..], b"c"].concat(), b"beside".to_vec());
        model.insert(key, value);
    }
    check(&db, &model);
    drop(db);
    let db = options.open(directory.path()).unwrap();
    check(&db, &model);
    db.compact(..).unwrap();
    check(&db, &model);
    db.verify().unwrap();
    db.close().unwrap();
}

#[test]
fn huge_values_work_and_larger_ones_are_refused() {
    let (directory, db) = open(Options::new().memory_budget(16 << 20));
    let value: Vec<u8> = (0..64_usize << 20).map(|at| (at >> 12) as u8).collect();
    db.put("huge", &value).unwrap();
    assert!(db.get("huge").unwrap().unwrap()[..] == value[..]);
    // Zeros that are never touched cost no memory.
    let too_large = vec![0; VALUE_LEN_MAX_BYTES + 1];
    let refused = |result: lightkv::Result<()>| {
        let error = result.unwrap_err();
        assert!(
            matches!(error, Error::ValueTooLarge { len_bytes, limit_bytes }
                if len_bytes == VALUE_LEN_MAX_BYTES + 1 && limit_bytes == VALUE_LEN_MAX_BYTES),
            "{error}"
        );
    };
    refused(db.put("huge", &too_large));
    let mut batch = WriteBatch::new();
    batch.put("other", "x").put("huge", &too_large);
    refused(db.write(batch));
    assert_eq!(db.scan(..).count(), 1);
    db.close().unwrap();
    let db = Db::open(directory.path()).unwrap();
    assert!(db.get("huge").unwrap().unwrap()[..] == value[..]);
}

/// Finds the limit by trying, and looks at both sides of it.
#[test]
fn batches_work_up_to_their_limit_and_are_refused_beyond_it() {
    for options in [small_options(), Options::new().memory_budget(16 << 20)] {
        let (_directory, db) = open(options);
        let batch = |total: usize, round: u8| {
            let mut batch = WriteBatch::new();
            for part in 0..total.div_ceil(1000) {
                let len = (total - part * 1000).min(1000);
                batch.put(format!("{part:06}"), vec![round; len]);
            }
            batch
        };
        let (mut fits, mut refused) = (1_usize, 64 << 20);
        let mut round = 0;
        while refused - fits > 1 {
            let middle = fits.midpoint(refused);
            round += 1;
            let before: Model = db
                .scan(..)
                .map(|entry| {
                    entry
                        .map(|(key, value)| (key.to_vec(), value.to_vec()))
                        .unwrap()
                })
                .collect();
            match db.write(batch(middle, round)) {
                Ok(()) => fits = middle,
                Err(Error::BatchTooLarge {
                    len_bytes,
                    limit_bytes,
                }) => {
                    assert!(len_bytes > limit_bytes && len_bytes > middle);
                    refused = middle;
                    check(&db, &before);
                }
                Err(error) => panic!("a batch of {middle} bytes: {error}"),
            }
        }
        assert!(fits > 20_000, "the limit is {fits} bytes");
        db.compact(..).unwrap();
        db.write(batch(fits, 255)).unwrap();
        assert_eq!(db.scan(..).count(), fits.div_ceil(1000));
        assert!(
            db.scan(..)
                .all(|entry| entry.unwrap().1.iter().all(|&byte| byte == 255))
        );
        db.close().unwrap();
    }
}

/// Thousands of operations in one batch, on one key and on many.
#[test]
fn batches_of_many_operations_work() {
    let (directory, db) = open(Options::new().memory_budget(16 << 20));
    let mut batch = WriteBatch::new();
    let mut model = Model::new();
    for number in 0..20_000_u32 {
        batch
            .put(number.to_be_bytes(), "")
            .put("one", number.to_string())
            .delete("two");
        model.insert(number.to_be_bytes().to_vec(), Vec::new());
    }
    model.insert(b"one".to_vec(), b"19999".to_vec());
    db.write(batch).unwrap();
    check(&db, &model);
    drop(db);
    check(&Db::open(directory.path()).unwrap(), &model);
}
