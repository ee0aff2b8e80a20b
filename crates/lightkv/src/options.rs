//! The few things that can be chosen. Each has a default that needs no thought.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lightkv_vfs::{RealVfs, Vfs};

use crate::{Db, Error, Result};

/// Which storage engine holds the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineKind {
    /// Write buffer in memory or persistent memory, sorted tables on SSD (LightKV, MSST'20).
    #[default]
    LightKv,
    /// All data in persistent memory under a hash index, an ordered index in memory (HiKV, ATC'17).
    HiKv,
}

impl EngineKind {
    /// All engines.
    pub const ALL: [Self; 2] = [Self::LightKv, Self::HiKv];

    /// The name, as in `--engine` of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::LightKv => "lightkv",
            Self::HiKv => "hikv",
        }
    }

    /// The number stored in pools and manifests.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::LightKv => 1,
            Self::HiKv => 2,
        }
    }

    /// The engine of a stored number.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

impl std::str::FromStr for EngineKind {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| format!("no engine is called {name:?}; there are: lightkv, hikv"))
    }
}

/// How blocks of sorted tables are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Compression {
    /// Stored as they are: the least processor time.
    #[default]
    None,
    /// LZ4, where it saves at least an eighth of a block.
    Lz4,
}

/// How a store is opened. `Options::new().open(directory)` is a good start for any laptop.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) engine: EngineKind,
    pub(crate) pmem_path: Option<PathBuf>,
    pub(crate) memory_budget_bytes: u64,
    pub(crate) compression: Compression,
    pub(crate) create_if_missing: bool,
    pub(crate) background_threads: usize,
    pub(crate) compaction_size: usize,
    pub(crate) space_amplification_max: f64,
    pub(crate) max_open_files: usize,
    pub(crate) poll_reads: bool,
    pub(crate) pool_bytes: Option<u64>,
    pub(crate) tuning: Tuning,
    pub(crate) vfs: Arc<dyn Vfs>,
    pub(crate) pool_medium: PoolMedium,
}

/// Inner sizes that tests shrink so that small data meets every mechanism. Not part of the stable API.
#[doc(hidden)]
#[derive(Clone, Debug, Default)]
pub struct Tuning {
    /// Bytes of the write buffer; default: a share of the memory budget.
    pub buffer_bytes: Option<u64>,
    /// Bytes a partition may buffer before it splits or is frozen.
    pub segment_bytes: Option<u64>,
    /// Entries a top leaf may hold before it splits or is frozen.
    pub leaf_entries: Option<usize>,
    /// Leaves of the prefix tree beyond which full leaves are linked instead of split.
    pub max_leaf_nodes: Option<usize>,
    /// Flushed bytes after which a partition that has gathered next to nothing is cold; default: those of the buffer.
    pub cold_after_bytes: Option<u64>,
    /// Fewest byte values a leaf may map after a normal split (the paper's `T_normal`).
    pub normal_split_values_min: Option<u32>,
    /// Unit in which write-buffer space is handed to partitions, in bytes.
    pub chunk_bytes: Option<u32>,
    /// Bytes of one journal file.
    pub journal_file_bytes: Option<u64>,
    /// Target bytes of a table block.
    pub block_bytes: Option<usize>,
    /// Values from this length on are stored in files of their own.
    pub large_value_bytes: Option<usize>,
    /// How long a write waits for room in the buffer before it fails with [`Error::BufferFull`].
    pub room_wait_max: Option<Duration>,
    /// How long a range deletion waits for others before leaves are flushed and tables rewritten for it; default: 10 s.
    pub range_purge_delay: Option<Duration>,
    /// Bytes that a pool may have; default: ample for the buffer. Below 32 MiB it is the size of its one extent.
    pub pool_bytes: Option<u64>,
    /// Bytes by which a pool grows; default: 32 MiB, or all of a smaller pool.
    pub extent_bytes: Option<u64>,
    /// Has a pool flush and fence also where nothing is kept by that, on tmpfs and in ordinary files: for measurements in which tmpfs
    /// stands for persistent memory.
    pub always_flush: bool,
    /// Which calls of the system that a pool makes fail.
    pub pool_faults: lightkv_pmem::PoolFaults,
    /// Room that is kept on the disk for an open, beside twice the manifest; default: 1 MiB.
    pub reserve_bytes: Option<u64>,
    /// Identity and hash secret of a new store; default: random numbers. Not 0.
    pub identity: Option<u64>,
    /// Starts no threads: what they would do is done by the calls that wait for it ([`Db::flush`],
    /// [`Db::compact`], [`Db::checkpoint`], [`Db::close`], a write without room) and by [`Db::sync`], in an
    /// order that depends on nothing but the calls. Only for one thread that uses the store.
    pub inline_background: bool,
    /// Writers change the ordered index of a hash-indexed engine themselves, instead of by way of queues (the paper's
    /// `HiKV_sync`).
    pub synchronous_index: bool,
    /// Keys and values go into a log before they go where they belong (the paper's `HiKV_wal`).
    pub write_ahead_log: bool,
    /// The ordered index is several trees, each of a range of keys and with one writer at a time (the paper's `HiKV_par`).
    pub range_partitioned_index: bool,
    /// Threads that recover a hash-indexed engine; default: as many as there are processors.
    pub recovery_threads: Option<usize>,
    /// A number of threads behind those queues that does not adapt (the paper's `HiKV-8-8` and `HiKV-12-4`).
    pub index_threads: Option<usize>,
}

/// What stands in for persistent memory when a pool is asked for. Not part of the stable API.
#[doc(hidden)]
#[derive(Clone, Debug, Default)]
pub enum PoolMedium {
    /// Files in `pmem_path`, as DAX where the file system has it.
    #[default]
    Files,
    /// Memory with crash simulation; `pmem_path` only switches the pool on.
    Emulated(lightkv_pmem::EmulatedMedium),
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

impl Options {
    /// The defaults: engine `lightkv`, no persistent memory (a journal in the store's directory), a
    /// memory budget of 1 GiB, no compression, two threads that compact beside the two that flush.
    pub fn new() -> Self {
        Self {
            engine: EngineKind::default(),
            pmem_path: None,
            memory_budget_bytes: 1 << 30,
            compression: Compression::default(),
            create_if_missing: true,
            background_threads: 2,
            compaction_size: 4,
            space_amplification_max: 2.0,
            max_open_files: 512,
            poll_reads: true,
            pool_bytes: None,
            tuning: Tuning::default(),
            vfs: Arc::new(RealVfs),
            pool_medium: PoolMedium::default(),
        }
    }

    /// The storage engine. A store keeps the engine that created it.
    pub fn engine(mut self, engine: EngineKind) -> Self {
        self.engine = engine;
        self
    }

    /// A directory for the pool's files, on a DAX file system (or on tmpfs, or any other, standing in
    /// for it). Fresh data then lives there and no journal is written. Default: none. A store that was
    /// created with a pool needs it at every open.
    pub fn pmem_path(mut self, directory: impl Into<PathBuf>) -> Self {
        self.pmem_path = Some(directory.into());
        self
    }

    /// The ONE cap on memory, in bytes: write buffer, indexes, cache, buffers of flushes, merges and scans, what the
    /// allocator has beside them. At least 16 MiB, less is refused with [`Error::InvalidOption`] when the store is
    /// opened; default 1 GiB. The process stays within a tenth and 2 MiB above it, resident pages of mapped journal and pool
    /// files included, but not those of persistent memory, besides what the program itself holds.
    ///
    /// Not bounded are the indexes of flushed keys, 4 to 6 bytes each, which are always resident: a budget of
    /// 10 MB for each million keys leaves about half of it for the rest. Tables bypass the operating system's page
    /// cache where the file system allows it. [`crate::Stats`] has a figure for each holder.
    pub fn memory_budget(mut self, bytes: u64) -> Self {
        self.memory_budget_bytes = bytes;
        self
    }

    /// Compression of table blocks; default none. May change between opens.
    pub fn compression(mut self, compression: Compression) -> Self {
        self.compression = compression;
        self
    }

    /// Whether a missing store is created; default true.
    pub fn create_if_missing(mut self, create: bool) -> Self {
        self.create_if_missing = create;
        self
    }

    /// Threads that compact, at low priority, 1 to 64; default 2. The first does so whenever there is something to merge, the
    /// others while merges owe more than half of the write buffer. With a budget below 64 MiB it is one. Two more threads flush.
    pub fn background_threads(mut self, threads: usize) -> Self {
        self.background_threads = threads;
        self
    }

    /// Tables of equal weight that one compaction merges (the paper's `CS`), 2 to 64; default 4. More
    /// writes less and scans slower.
    pub fn compaction_size(mut self, tables: usize) -> Self {
        self.compaction_size = tables;
        self
    }

    /// Space of tables beyond which garbage is collected early, as a multiple of what is live in them; at
    /// least 1.1, default 2. Less rewrites more: at 2 each overwritten byte costs at most one more to be
    /// given back. Held for each range of keys, by an estimate that may be off by a tenth. What snapshots
    /// and scans hold is kept; the write buffer and the journal come on top.
    pub fn space_amplification_max(mut self, ratio: f64) -> Self {
        self.space_amplification_max = ratio;
        self
    }

    /// Table files kept open at once; default 512, so that the usual limit of 1,024 a process suffices. Up to three dozen
    /// descriptors come on top: journal, manifest, lock, the files being written, and those by which several reads are begun at once;
    /// and for a moment a sixteenth of the limit, 16 at most, for tables that a thread opens, or reads, together, and a quarter for all that merges and
    /// long scans read ahead. A process that has none left does without those, gives up some of its tables, and waits for up to 63 ms; if that is not
    /// enough, calls fail with [`Error::Io`] and work again when there are some.
    pub fn max_open_files(mut self, files: usize) -> Self {
        self.max_open_files = files;
        self
    }

    /// Whether a get that needs the device may poll for its read instead of sleeping; default: yes. A read of 40 us is done some 10 us earlier then,
    /// most in a virtual machine, and takes that much more of the processor. It is done only as long as measured reads are quicker
    /// for it, take less than 150 us, and reads that are waited for, flushes and merges in all stores of the process are together at most half as many as
    /// processors: never where there is one.
    /// [`Counters::table_reads_polled`](crate::Counters::table_reads_polled) says how often.
    pub fn poll_reads(mut self, may_poll: bool) -> Self {
        self.poll_reads = may_poll;
        self
    }

    /// What data in the pool may take, in bytes, at least 16 MiB. May change between opens.
    ///
    /// The engine `lightkv`: fresh data, until it is flushed to tables; default 40 % of the memory budget. The more there is room for, the less is
    /// written to the SSD. The index of that data stays in memory, about 20 bytes a record: where it would take more than a
    /// quarter of the budget, less of the pool is used. Persistent memory (DAX) is no part of the budget; on tmpfs and in ordinary files the pool's pages
    /// lie in memory and are counted, so there it has eleven sixteenths of the budget at most. Without
    /// [`pmem_path`](Options::pmem_path) there is no pool, and this is refused with [`Error::InvalidOption`].
    ///
    /// An engine that keeps all its data in a pool: default 1 TiB, so in fact what the medium has. Full, the store refuses puts with
    /// [`Error::NoSpace`]; reads and deletes go on.
    pub fn pool_bytes(mut self, bytes: u64) -> Self {
        self.pool_bytes = Some(bytes);
        self
    }

    /// The file system; for tests. Not part of the stable API.
    #[doc(hidden)]
    pub fn vfs(mut self, vfs: Arc<dyn Vfs>) -> Self {
        self.vfs = vfs;
        self
    }

    /// What stands in for persistent memory; for tests. Not part of the stable API.
    #[doc(hidden)]
    pub fn pool_medium(mut self, medium: PoolMedium) -> Self {
        self.pool_medium = medium;
        self
    }

    /// Inner sizes; for tests. Not part of the stable API.
    #[doc(hidden)]
    pub fn tuning(mut self, tuning: Tuning) -> Self {
        self.tuning = tuning;
        self
    }

    /// Opens the store in a directory, recovering it if the last process died.
    ///
    /// Behind a killed process it reads the newest tens of megabytes of the journal, and replays the rest, up to three quarters of the memory
    /// budget, while the store is in use ([`Levels::unreplayed_bytes`](crate::Levels)): until then a get or a put may have to read its
    /// key's newest record first, and everything that looks at more than single keys waits for all of it. What it did not read and finds damaged
    /// is an [`Error::Corruption`] of whoever needs it, and of the next open. After a power loss, and before Linux 6.8, it reads everything.
    ///
    /// # Errors
    /// [`Error::Locked`] if it is open elsewhere, [`Error::Missing`], [`Error::Foreign`],
    /// [`Error::NewerVersion`], [`Error::EngineMismatch`], [`Error::Corruption`] (nothing is changed then),
    /// [`Error::InvalidOption`], [`Error::NoSpace`], [`Error::Io`].
    pub fn open(self, directory: impl AsRef<Path>) -> Result<Db> {
        self.check()?;
        crate::engines::open(directory.as_ref(), self).map(Db::from_engine)
    }

    fn check(&self) -> Result<()> {
        let invalid = |option, message: String| Err(Error::InvalidOption { option, message });
        if self.memory_budget_bytes < 16 << 20 {
            return invalid(
                "memory_budget",
                format!(
                    "{} bytes are too few, 16 MiB are the least",
                    self.memory_budget_bytes
                ),
            );
        }
        if !(1..=64).contains(&self.background_threads) {
            return invalid("background_threads", "1 to 64 are possible".into());
        }
        if !(2..=64).contains(&self.compaction_size) {
            return invalid("compaction_size", "2 to 64 are possible".into());
        }
        if self.space_amplification_max.is_nan() || self.space_amplification_max < 1.1 {
            return invalid("space_amplification_max", "1.1 is the least".into());
        }
        if self.pool_bytes.is_some_and(|bytes| bytes < 16 << 20) {
            return invalid("pool_bytes", "16 MiB are the least".into());
        }
        if self.pool_bytes.is_some()
            && self.engine == EngineKind::LightKv
            && self.pmem_path.is_none()
        {
            return invalid(
                "pool_bytes",
                "without pmem_path there is no pool; fresh data takes a part of memory_budget"
                    .into(),
            );
        }
        if self.max_open_files < 8 {
            return invalid("max_open_files", "8 are the least".into());
        }
        Ok(())
    }
}

/// How one write is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOptions {
    pub(crate) sync: bool,
    pub(crate) deadline: Option<Duration>,
}

impl WriteOptions {
    /// The defaults: no sync.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the write, and all that were acknowledged before, survive power loss when it returns; default false. That
    /// holds for an empty batch and an empty range, too. Waiting writers share one `fdatasync`. On persistent memory every
    /// write does already.
    pub fn sync(mut self, sync: bool) -> Self {
        self.sync = sync;
        self
    }

    /// Longest wait for background work and for other writers of the same keys, counted from the call;
    /// default: as long as it takes. Instead of waiting longer the write fails with
    /// [`Error::DeadlineExceeded`] and changes nothing; zero never waits. The time of the write itself, and that of
    /// a sync, is not part of it.
    pub fn deadline(mut self, wait_max: Duration) -> Self {
        self.deadline = Some(wait_max);
        self
    }
}
