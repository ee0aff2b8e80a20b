//! A file system in memory that crashes and fails on demand.
//!
//! It keeps two versions of everything: the current one, which reads and mappings see, and the
//! synced one, which a power loss cannot take. [`MemoryVfs::crash_image`] mixes the two by a seed;
//! `crash` states the rules. [`MemoryVfs::inject`] makes calls fail. A write that was [begun](Vfs::start_write) is done
//! when it is waited for, as late as it may be.

mod crash;
mod fault;
mod file;
mod region;
mod tree;

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

pub use fault::{Fault, FaultKind, Operation};

use crate::writes::LateWrite;
use crate::{
    DirectoryEntry, FileLock, Mapping, OpenMode, PendingWrite, Vfs, VfsFile, WriteRequest,
};
pub use crash::{CrashChooser, CrashQuestion};
use fault::{FaultPlan, storage_full};
use file::{FileContent, SECTOR_LEN_BYTES};
use region::Region;
use tree::{FileNode, Node, OpenNode, Tree};

/// Of all file systems that are no image of another one.
const FIRST_MOUNT: u128 = 1;

/// What [`Vfs::available_bytes`] says without a capacity.
const AVAILABLE_UNLIMITED_BYTES: u64 = 1 << 40;

/// A file system in memory. A clone is another handle on the same files; [`MemoryVfs::crash_image`]
/// and [`MemoryVfs::kill_image`] copy them.
///
/// Paths are resolved from the root, relative ones too. There are no symbolic links. A new file
/// system holds nothing but its root directory.
///
/// Everything is as durable as on a disk: file content and length after [`VfsFile::sync_data`],
/// names after [`Vfs::sync_directory`]; until then a crash image may lack it.
///
/// A mapped file can grow while it is mapped only up to the larger of 64 MiB and twice its length at
/// the time of the first mapping; beyond that growing fails as unsupported.
#[derive(Clone, Debug)]
pub struct MemoryVfs {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Held during every operation, so that an image is one moment of the whole file system.
    state: Mutex<State>,
}

/// Called before each change; see [`MemoryVfs::observe_changes`].
#[derive(Clone)]
struct Observer(Arc<dyn Fn(Operation) + Send + Sync>);

impl std::fmt::Debug for Observer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Observer")
    }
}

#[derive(Debug)]
struct State {
    tree: Tree,
    faults: FaultPlan,
    capacity_bytes: Option<u64>,
    sync_duration: Duration,
    read_bytes_per_second: u64,
    offers_direct: bool,
    observer: Option<Observer>,
    /// The same in images of a kill, another one in those of a power loss.
    mount_identity: u128,
    /// All files that have a name or a handle: what they use counts against the capacity.
    files: Vec<Weak<FileNode>>,
    locked: HashSet<LockKey>,
}

/// Identifies a file by its address; a `MemoryLock` keeps the file alive, so it is not reused.
type LockKey = usize;

impl Default for MemoryVfs {
    fn default() -> MemoryVfs {
        MemoryVfs::new()
    }
}

impl MemoryVfs {
    /// An empty file system without a capacity limit.
    pub fn new() -> MemoryVfs {
        MemoryVfs::with_tree(Tree::new(), None)
    }

    fn with_tree(tree: Tree, capacity_bytes: Option<u64>) -> MemoryVfs {
        let mut files: Vec<Weak<FileNode>> = Vec::new();
        let mut seen = HashSet::new();
        for directory in tree.directories.values() {
            for node in directory.current.values() {
                if let Node::File(file) = node
                    && seen.insert(Arc::as_ptr(file))
                {
                    files.push(Arc::downgrade(file));
                }
            }
        }
        let state = State {
            tree,
            faults: FaultPlan::default(),
            capacity_bytes,
            sync_duration: Duration::ZERO,
            read_bytes_per_second: u64::MAX,
            offers_direct: false,
            observer: None,
            mount_identity: FIRST_MOUNT,
            files,
            locked: HashSet::new(),
        };
        MemoryVfs {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
            }),
        }
    }

    /// What a power loss at this moment might leave: everything synced, and of the rest what the
    /// seed says. Seed 0 loses all of it, seed 1 nothing, other seeds tear and reorder. A function
    /// of the history and the seed. The image has the same capacity, no faults and no locks, and all
    /// that is in it is durable.
    ///
    /// Stores to a mapping must not run at the same time: a torn copy of one would be a crash that
    /// no disk can produce.
    pub fn crash_image(&self, seed: u64) -> MemoryVfs {
        let state = self.shared.state.lock();
        state.image(
            crash::crash_image(&state.tree, seed),
            state.mount_identity + 1,
        )
    }

    /// What a power loss at this moment leaves if each thing fares as `chooser` says; else as
    /// [`MemoryVfs::crash_image`]. Asks about directories, then about the files whose names survive.
    pub fn crash_image_with(&self, chooser: &mut dyn CrashChooser) -> MemoryVfs {
        let state = self.shared.state.lock();
        let tree = crash::crash_image_with(&state.tree, chooser);
        state.image(tree, state.mount_identity + 1)
    }

    /// Has a function called before each call that changes or syncs something takes effect. It runs on
    /// the calling thread, without locks of this file system, and may take images. `None` ends that.
    pub fn observe_changes(&self, observer: Option<Arc<dyn Fn(Operation) + Send + Sync>>) {
        self.shared.state.lock().observer = observer.map(Observer);
    }

    /// What kill -9 at this moment leaves: everything that was written or stored to a mapping. What
    /// was not synced can still be lost by a crash of the image. The image has the same capacity, no
    /// faults and no locks. Stores to a mapping must not run at the same time.
    pub fn kill_image(&self) -> MemoryVfs {
        let state = self.shared.state.lock();
        state.image(crash::kill_image(&state.tree), state.mount_identity)
    }

    /// Plans a failure. Faults are independent; if several are due, the first injected decides how
    /// the call fails.
    pub fn inject(&self, fault: Fault) {
        self.shared.state.lock().faults.inject(fault);
    }

    /// Forgets all planned failures; calls succeed again.
    pub fn clear_faults(&self) {
        self.shared.state.lock().faults.clear();
    }

    /// How often an operation was called on this file system, failed calls included.
    pub fn calls(&self, operation: Operation) -> u64 {
        self.shared.state.lock().faults.calls(operation)
    }

    /// Limits the space of all files together, in bytes; `None` lifts the limit. Writes and
    /// allocations that would need more fail with [`io::ErrorKind::StorageFull`]. Removed files count
    /// until their last handle is gone.
    pub fn set_capacity_bytes(&self, capacity_bytes: Option<u64>) {
        self.shared.state.lock().capacity_bytes = capacity_bytes;
    }

    /// Makes every [`VfsFile::sync_data`] take this long, as a device would, so that group commit has
    /// something to group.
    pub fn set_sync_duration(&self, duration: Duration) {
        self.shared.state.lock().sync_duration = duration;
    }

    /// Makes every read take as long as on a device that gives so many bytes a second; several reads do not wait for each other. `u64::MAX`: no
    /// time at all.
    pub fn set_read_rate(&self, bytes_per_second: u64) {
        self.shared.state.lock().read_bytes_per_second = bytes_per_second;
    }

    /// From now on files that are [opened so](Vfs::open_direct) ask for whole sectors, as on a device; before, they are like all
    /// others, as on file systems that cannot do more. Images have it from the file system they are of.
    pub fn offer_direct(&self) {
        self.shared.state.lock().offers_direct = true;
    }

    fn open_file(&self, path: &Path, mode: OpenMode) -> io::Result<MemoryFile> {
        if matches!(mode, OpenMode::CreateNew | OpenMode::CreateTruncate) {
            self.shared.announce(Operation::Open);
        }
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::Open, &[path])?;
        let node = match (state.tree.find_file(path), mode) {
            (Ok(_), OpenMode::CreateNew) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Ok(node), OpenMode::CreateTruncate) => {
                node.content.lock().set_len(0)?;
                node
            }
            (Ok(node), OpenMode::Read | OpenMode::ReadWrite) => node,
            (Err(error), OpenMode::CreateNew | OpenMode::CreateTruncate)
                if error.kind() == io::ErrorKind::NotFound =>
            {
                state.create_file(path)?
            }
            (Err(error), _) => return Err(error),
        };
        Ok(MemoryFile {
            shared: Arc::clone(&self.shared),
            node: OpenNode::new(node),
            path: path.to_path_buf(),
            is_writable: mode != OpenMode::Read,
            unit_bytes: 1,
        })
    }
}

impl State {
    /// A file system of the same kind.
    fn image(&self, tree: Tree, mount_identity: u128) -> MemoryVfs {
        let image = MemoryVfs::with_tree(tree, self.capacity_bytes);
        image.shared.state.lock().mount_identity = mount_identity;
        if self.offers_direct {
            image.offer_direct();
        }
        image
    }

    fn used_bytes(&mut self) -> u64 {
        self.files.retain(|file| file.strong_count() > 0);
        let directories = self.tree.directories.values();
        let named: HashSet<_> = directories
            .flat_map(|directory| directory.current.values())
            .filter_map(|node| match node {
                Node::File(file) => Some(Arc::as_ptr(file)),
                Node::Directory(_) => None,
            })
            .collect();
        self.files
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|file| file.is_open() || named.contains(&Arc::as_ptr(file)))
            .map(|file| file.content.lock().used_bytes() as u64)
            .sum()
    }

    /// Refuses to let a file use `end` bytes if there is no room; says how far it could go.
    fn check_capacity(&mut self, file: &FileNode, end: u64) -> Result<(), u64> {
        let Some(capacity_bytes) = self.capacity_bytes else {
            return Ok(());
        };
        let own_bytes = file.content.lock().used_bytes() as u64;
        if end <= own_bytes {
            return Ok(());
        }
        let free_bytes = capacity_bytes.saturating_sub(self.used_bytes());
        if end - own_bytes <= free_bytes {
            Ok(())
        } else {
            Err(own_bytes + free_bytes)
        }
    }

    fn create_file(&mut self, path: &Path) -> io::Result<Arc<FileNode>> {
        let file = FileNode::new(self.tree.new_id(), FileContent::new());
        self.tree.insert_file(path, Arc::clone(&file))?;
        self.files.push(Arc::downgrade(&file));
        Ok(file)
    }
}

impl Vfs for MemoryVfs {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn VfsFile>> {
        Ok(Arc::new(self.open_file(path, mode)?))
    }

    fn mount_identity(&self, _path: &Path) -> Option<u128> {
        Some(self.shared.state.lock().mount_identity)
    }

    /// Like any file, but it asks for whole sectors, as a file that is direct does.
    fn open_direct(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn VfsFile>> {
        let mut file = self.open_file(path, mode)?;
        if self.shared.state.lock().offers_direct {
            file.unit_bytes = SECTOR_LEN_BYTES;
        }
        Ok(Arc::new(file))
    }

    /// As late as it may be: what nobody has waited for is not in the file.
    fn start_write(&self, request: WriteRequest) -> Box<dyn PendingWrite> {
        Box::new(LateWrite(Some(request)))
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.shared.announce(Operation::CreateDirectory);
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::CreateDirectory, &[path])?;
        state.tree.create_directory(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.shared.announce(Operation::Remove);
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::Remove, &[path])?;
        state.tree.remove_file(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.shared.announce(Operation::Rename);
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::Rename, &[from, to])?;
        state.tree.rename(from, to)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.shared.announce(Operation::HardLink);
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::HardLink, &[from, to])?;
        let file = state.tree.find_file(from)?;
        state.tree.insert_file(to, file)
    }

    fn link_count(&self, path: &Path) -> io::Result<u64> {
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::List, &[path])?;
        let file = state.tree.find_file(path)?;
        Ok(state.tree.link_count(&file))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirectoryEntry>> {
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::List, &[path])?;
        let id = state.tree.find_directory(path)?;
        let names = &state.tree.directories[&id].current;
        Ok(names
            .iter()
            .map(|(name, node)| DirectoryEntry {
                name: name.clone(),
                is_directory: matches!(node, Node::Directory(_)),
                len_bytes: match node {
                    Node::Directory(_) => 0,
                    Node::File(file) => file.content.lock().len() as u64,
                },
            })
            .collect())
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::List, &[path])?;
        match state.tree.find(path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.shared.announce(Operation::SyncDirectory);
        let mut state = self.shared.state.lock();
        match state.faults.next(Operation::SyncDirectory, &[path]) {
            None => state.tree.sync_directory(path),
            Some(FaultKind::Lying) => state.tree.find_directory(path).map(|_| ()),
            Some(kind) => Err(kind.to_error()),
        }
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn FileLock>> {
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::Lock, &[path])?;
        let node = match state.tree.find_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => state.create_file(path)?,
            found => found?,
        };
        let node = OpenNode::new(node);
        if !state.locked.insert(node.address()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(MemoryLock {
            shared: Arc::clone(&self.shared),
            node,
        }))
    }

    fn available_bytes(&self, _path: &Path) -> io::Result<u64> {
        let mut state = self.shared.state.lock();
        Ok(match state.capacity_bytes {
            None => AVAILABLE_UNLIMITED_BYTES,
            Some(capacity_bytes) => capacity_bytes.saturating_sub(state.used_bytes()),
        })
    }
}

#[derive(Debug)]
struct MemoryLock {
    shared: Arc<Shared>,
    node: OpenNode,
}

impl FileLock for MemoryLock {}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.locked.remove(&self.node.address());
    }
}

#[derive(Debug)]
struct MemoryFile {
    shared: Arc<Shared>,
    node: OpenNode,
    path: PathBuf,
    is_writable: bool,
    unit_bytes: usize,
}

impl MemoryFile {
    fn check_writable(&self) -> io::Result<()> {
        if self.is_writable {
            Ok(())
        } else {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }
}

impl VfsFile for MemoryFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes_per_second = {
            let mut state = self.shared.state.lock();
            state.faults.check(Operation::Read, &[&self.path])?;
            self.node.content.lock().read_exact_at(buffer, offset)?;
            state.read_bytes_per_second
        };
        if bytes_per_second < u64::MAX {
            let seconds = buffer.len() as f64 / bytes_per_second as f64;
            std::thread::sleep(Duration::from_secs_f64(seconds));
        }
        Ok(())
    }

    fn read_at_least(&self, buffer: &mut [u8], len_min: usize, offset: u64) -> io::Result<usize> {
        // As much as there is, like one call of the operating system.
        let len = self.len_bytes()?.saturating_sub(offset);
        let len = len_min.max(buffer.len().min(usize::try_from(len).unwrap_or(usize::MAX)));
        self.read_exact_at(&mut buffer[..len], offset)?;
        Ok(len)
    }

    fn alignment_bytes(&self) -> usize {
        self.unit_bytes
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.shared.announce(Operation::Write);
        self.check_writable()?;
        let mut state = self.shared.state.lock();
        match state.faults.next(Operation::Write, &[&self.path]) {
            None => {}
            Some(FaultKind::ShortWrite) => {
                let first_half = &bytes[..bytes.len() / 2];
                self.node.content.lock().write_at(first_half, offset)?;
                return Err(io::ErrorKind::WriteZero.into());
            }
            Some(kind) => return Err(kind.to_error()),
        }
        let end = offset.saturating_add(bytes.len() as u64);
        if let Err(end_max) = state.check_capacity(&self.node, end) {
            // As on a disk: what still fits is written.
            let fitting = end_max.saturating_sub(offset).min(bytes.len() as u64);
            let fitting = &bytes[..fitting as usize];
            self.node.content.lock().write_at(fitting, offset)?;
            return Err(storage_full());
        }
        self.node.content.lock().write_at(bytes, offset)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        let _state = self.shared.state.lock();
        Ok(self.node.content.lock().len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.shared.announce(Operation::SetLen);
        self.check_writable()?;
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::SetLen, &[&self.path])?;
        self.node.content.lock().set_len(len)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.shared.announce(Operation::Allocate);
        self.check_writable()?;
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::Allocate, &[&self.path])?;
        if state.check_capacity(&self.node, len).is_err() {
            return Err(storage_full());
        }
        self.node.content.lock().allocate(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.shared.sync(&self.node, &self.path)
    }

    fn start_writeback(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    fn writeback(&self, _offset: u64, _len: u64) -> io::Result<()> {
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::Writeback, &[&self.path])
    }

    fn check_writeback(&self) -> io::Result<()> {
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::CheckWriteback, &[&self.path])
    }

    fn drop_from_cache(&self, _offset: u64, _len: u64) -> io::Result<()> {
        let _state = self.shared.state.lock();
        self.node.content.lock().drop_clean();
        Ok(())
    }

    fn map(&self, len: usize, _populate: bool) -> io::Result<Box<dyn Mapping>> {
        self.check_writable()?;
        let mut state = self.shared.state.lock();
        state.faults.check(Operation::Map, &[&self.path])?;
        let region = self.node.content.lock().map(len)?;
        Ok(Box::new(MemoryMapping {
            _node: self.node.clone(),
            region,
            len,
        }))
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

impl Shared {
    /// Tells the observer of a change that is about to happen.
    fn announce(&self, operation: Operation) {
        let observer = self.state.lock().observer.clone();
        if let Some(Observer(observer)) = observer {
            observer(operation);
        }
    }

    /// Makes a file durable; or loses it, if a fault is planned.
    fn sync(&self, node: &FileNode, path: &Path) -> io::Result<()> {
        self.announce(Operation::SyncData);
        let (outcome, duration) = {
            let mut state = self.state.lock();
            let fault = state.faults.next(Operation::SyncData, &[path]);
            let mut content = node.content.lock();
            // Durable at once, as early as a device could make it: stores during the wait below are
            // not covered, which is all that a caller may rely on.
            match fault {
                None => content.sync(),
                Some(FaultKind::Lying) => {}
                Some(_) => content.fail_sync(),
            }
            let outcome = match fault {
                None | Some(FaultKind::Lying) => Ok(()),
                Some(kind) => Err(kind.to_error()),
            };
            (outcome, state.sync_duration)
        };
        if !duration.is_zero() {
            std::thread::sleep(duration);
        }
        outcome
    }
}

/// A live mapping. Keeps the region, and so the pointer, even after the file was removed.
#[derive(Debug)]
struct MemoryMapping {
    _node: OpenNode,
    region: Arc<Region>,
    len: usize,
}

impl Mapping for MemoryMapping {
    fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests;
