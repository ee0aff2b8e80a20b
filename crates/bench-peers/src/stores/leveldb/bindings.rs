//! The part of LevelDB's C interface (`leveldb/c.h`, version 1.23) that is needed, and safe types around it.

use std::ffi::{CStr, CString, c_char, c_int, c_uchar};
use std::fmt::Display;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt;
use std::ptr::{self, NonNull};
use std::slice;

use crate::stores::{BLOOM_BITS, StoreSettings, cursor};

/// An object that only LevelDB looks into.
#[repr(C)]
struct Opaque {
    _bytes: [u8; 0],
    // Neither Send, Sync nor Unpin by itself: the types below say what holds.
    _marker: PhantomData<(*mut u8, std::marker::PhantomPinned)>,
}

// SAFETY: the declarations follow leveldb/c.h of version 1.23, which is the interface of the archive that build.rs
// links. The last is a static member function of the archive without arguments other than its integer.
unsafe extern "C" {
    fn leveldb_open(
        options: *const Opaque,
        name: *const c_char,
        error: *mut *mut c_char,
    ) -> *mut Opaque;
    fn leveldb_close(db: *mut Opaque);
    fn leveldb_put(
        db: *mut Opaque,
        options: *const Opaque,
        key: *const c_char,
        key_len: usize,
        value: *const c_char,
        value_len: usize,
        error: *mut *mut c_char,
    );
    fn leveldb_delete(
        db: *mut Opaque,
        options: *const Opaque,
        key: *const c_char,
        key_len: usize,
        error: *mut *mut c_char,
    );
    fn leveldb_get(
        db: *mut Opaque,
        options: *const Opaque,
        key: *const c_char,
        key_len: usize,
        value_len: *mut usize,
        error: *mut *mut c_char,
    ) -> *mut c_char;
    fn leveldb_create_iterator(db: *mut Opaque, options: *const Opaque) -> *mut Opaque;
    fn leveldb_iter_destroy(cursor: *mut Opaque);
    fn leveldb_iter_valid(cursor: *const Opaque) -> c_uchar;
    fn leveldb_iter_seek(cursor: *mut Opaque, key: *const c_char, key_len: usize);
    fn leveldb_iter_next(cursor: *mut Opaque);
    fn leveldb_iter_key(cursor: *const Opaque, len: *mut usize) -> *const c_char;
    fn leveldb_iter_value(cursor: *const Opaque, len: *mut usize) -> *const c_char;
    fn leveldb_iter_get_error(cursor: *const Opaque, error: *mut *mut c_char);
    fn leveldb_compact_range(
        db: *mut Opaque,
        start: *const c_char,
        start_len: usize,
        limit: *const c_char,
        limit_len: usize,
    );
    fn leveldb_options_create() -> *mut Opaque;
    fn leveldb_options_destroy(options: *mut Opaque);
    fn leveldb_options_set_create_if_missing(options: *mut Opaque, create: c_uchar);
    fn leveldb_options_set_compression(options: *mut Opaque, kind: c_int);
    fn leveldb_options_set_write_buffer_size(options: *mut Opaque, bytes: usize);
    fn leveldb_options_set_cache(options: *mut Opaque, cache: *mut Opaque);
    fn leveldb_options_set_filter_policy(options: *mut Opaque, filter: *mut Opaque);
    fn leveldb_cache_create_lru(bytes: usize) -> *mut Opaque;
    fn leveldb_cache_destroy(cache: *mut Opaque);
    fn leveldb_filterpolicy_create_bloom(bits_per_key: c_int) -> *mut Opaque;
    fn leveldb_filterpolicy_destroy(filter: *mut Opaque);
    fn leveldb_readoptions_create() -> *mut Opaque;
    fn leveldb_readoptions_destroy(options: *mut Opaque);
    fn leveldb_writeoptions_create() -> *mut Opaque;
    fn leveldb_writeoptions_destroy(options: *mut Opaque);
    fn leveldb_free(pointer: *mut std::ffi::c_void);
    /// `leveldb::EnvPosixTestHelper::SetReadOnlyMMapLimit(int)`: the only way to turn mappings off.
    #[link_name = "_ZN7leveldb18EnvPosixTestHelper20SetReadOnlyMMapLimitEi"]
    fn set_mapped_files_max(files: c_int);
}

/// `leveldb_no_compression`.
const COMPRESSION_NONE: c_int = 0;

/// An open database with the objects it was opened with, which must outlive it.
pub(super) struct Handle {
    db: NonNull<Opaque>,
    options: NonNull<Opaque>,
    read_options: NonNull<Opaque>,
    write_options: NonNull<Opaque>,
    cache: Option<NonNull<Opaque>>,
    filter: Option<NonNull<Opaque>>,
}

// SAFETY: LevelDB's documentation allows a database to be used by many threads without outside locking; the options are
// only read, cache and filter synchronise themselves.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// Opens or creates a database.
    pub(super) fn open(settings: &StoreSettings) -> Result<Self, String> {
        let name =
            CString::new(settings.directory.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
        // SAFETY: a process opens one database here, so the limit is set before LevelDB's environment exists, as the
        // function asks for. The create functions have no requirements and abort instead of returning null. The setters
        // get live objects. Cache and filter are destroyed after the database only, by `Drop`.
        unsafe {
            set_mapped_files_max(0);
            let options = not_null(leveldb_options_create())?;
            leveldb_options_set_create_if_missing(options.as_ptr(), 1);
            let (mut cache, mut filter) = (None, None);
            if !settings.defaults {
                let lru = not_null(leveldb_cache_create_lru(settings.block_cache_bytes()))?;
                let bloom = not_null(leveldb_filterpolicy_create_bloom(c_int::from(BLOOM_BITS)))?;
                leveldb_options_set_compression(options.as_ptr(), COMPRESSION_NONE);
                leveldb_options_set_write_buffer_size(options.as_ptr(), settings.memtable_bytes());
                leveldb_options_set_cache(options.as_ptr(), lru.as_ptr());
                leveldb_options_set_filter_policy(options.as_ptr(), bloom.as_ptr());
                (cache, filter) = (Some(lru), Some(bloom));
            }
            let mut error = ptr::null_mut();
            let db = leveldb_open(options.as_ptr(), name.as_ptr(), &raw mut error);
            // What was made for a database that did not open is left to the end of the process, which follows.
            taken(error)?;
            Ok(Self {
                db: not_null(db)?,
                options,
                read_options: not_null(leveldb_readoptions_create())?,
                write_options: not_null(leveldb_writeoptions_create())?,
                cache,
                filter,
            })
        }
    }

    pub(super) fn put(&self, key: &[u8], value: &[u8]) -> Result<(), String> {
        let mut error = ptr::null_mut();
        // SAFETY: live objects, and slices that are only read during the call.
        unsafe {
            leveldb_put(
                self.db.as_ptr(),
                self.write_options.as_ptr(),
                key.as_ptr().cast(),
                key.len(),
                value.as_ptr().cast(),
                value.len(),
                &raw mut error,
            );
        }
        taken(error)
    }

    pub(super) fn delete(&self, key: &[u8]) -> Result<(), String> {
        let mut error = ptr::null_mut();
        // SAFETY: as in `put`.
        unsafe {
            leveldb_delete(
                self.db.as_ptr(),
                self.write_options.as_ptr(),
                key.as_ptr().cast(),
                key.len(),
                &raw mut error,
            );
        }
        taken(error)
    }

    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Allocated>, String> {
        let (mut error, mut len) = (ptr::null_mut(), 0);
        // SAFETY: as in `put`.
        let value = unsafe {
            leveldb_get(
                self.db.as_ptr(),
                self.read_options.as_ptr(),
                key.as_ptr().cast(),
                key.len(),
                &raw mut len,
                &raw mut error,
            )
        };
        taken(error)?;
        Ok(NonNull::new(value.cast()).map(|bytes| Allocated { bytes, len }))
    }

    /// A cursor at the first entry whose key is not below `key`.
    pub(super) fn seek(&self, key: &[u8]) -> Cursor<'_> {
        // SAFETY: live objects; the cursor borrows the handle, so the database outlives it.
        let cursor = unsafe {
            let cursor = leveldb_create_iterator(self.db.as_ptr(), self.read_options.as_ptr());
            leveldb_iter_seek(cursor, key.as_ptr().cast(), key.len());
            cursor
        };
        Cursor {
            cursor,
            _handle: PhantomData,
        }
    }

    /// Flushes the memtable, then compacts everything before a key.
    pub(super) fn compact_before(&self, limit: &[u8]) {
        // SAFETY: a live database; a null start means the first key; the limit is only read during the call.
        unsafe {
            leveldb_compact_range(
                self.db.as_ptr(),
                ptr::null(),
                0,
                limit.as_ptr().cast(),
                limit.len(),
            );
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: cursors borrow the handle, so none is left. Everything was created by `open` and is destroyed once, the
        // database before what it uses.
        unsafe {
            leveldb_close(self.db.as_ptr());
            leveldb_options_destroy(self.options.as_ptr());
            leveldb_readoptions_destroy(self.read_options.as_ptr());
            leveldb_writeoptions_destroy(self.write_options.as_ptr());
            if let Some(cache) = self.cache {
                leveldb_cache_destroy(cache.as_ptr());
            }
            if let Some(filter) = self.filter {
                leveldb_filterpolicy_destroy(filter.as_ptr());
            }
        }
    }
}

/// Bytes that LevelDB allocated and handed over.
pub(super) struct Allocated {
    bytes: NonNull<u8>,
    len: usize,
}

impl Deref for Allocated {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: LevelDB returned that many bytes, which are ours until `drop`.
        unsafe { slice::from_raw_parts(self.bytes.as_ptr(), self.len) }
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        // SAFETY: allocated by LevelDB, freed once.
        unsafe { leveldb_free(self.bytes.as_ptr().cast()) };
    }
}

/// A position in the database's entries of one moment.
pub(super) struct Cursor<'a> {
    cursor: *mut Opaque,
    _handle: PhantomData<&'a Handle>,
}

impl cursor::Cursor for Cursor<'_> {
    fn entry(&self) -> Option<(&[u8], &[u8])> {
        let (mut key_len, mut value_len) = (0, 0);
        // SAFETY: a live cursor; key and value are asked for only where it is valid, and LevelDB keeps them until the
        // cursor moves, which takes `&mut self`.
        unsafe {
            if leveldb_iter_valid(self.cursor) == 0 {
                return None;
            }
            let key = leveldb_iter_key(self.cursor, &raw mut key_len);
            let value = leveldb_iter_value(self.cursor, &raw mut value_len);
            Some((
                slice::from_raw_parts(key.cast(), key_len),
                slice::from_raw_parts(value.cast(), value_len),
            ))
        }
    }

    fn advance(&mut self) {
        // SAFETY: a live cursor, which must be valid to move.
        unsafe {
            if leveldb_iter_valid(self.cursor) != 0 {
                leveldb_iter_next(self.cursor);
            }
        }
    }

    fn status(&self) -> Result<(), impl Display> {
        let mut error = ptr::null_mut();
        // SAFETY: a live cursor.
        unsafe { leveldb_iter_get_error(self.cursor, &raw mut error) };
        taken(error)
    }
}

impl Drop for Cursor<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `seek`, destroyed once.
        unsafe { leveldb_iter_destroy(self.cursor) };
    }
}

/// Turns LevelDB's message, if there is one, into an error.
fn taken(error: *mut c_char) -> Result<(), String> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: not null, so LevelDB allocated a string with an end for us to free.
    unsafe {
        let message = CStr::from_ptr(error).to_string_lossy().into_owned();
        leveldb_free(error.cast());
        Err(message)
    }
}

fn not_null(object: *mut Opaque) -> Result<NonNull<Opaque>, String> {
    NonNull::new(object).ok_or_else(|| "LevelDB returned a null pointer".to_owned())
}
