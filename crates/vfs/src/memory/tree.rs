//! The names of the memory file system: directories, and which changes to them are durable.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Deref;
use std::path::{Component, Path};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::file::FileContent;

/// One file, whatever its names. Shared by directory entries and open handles.
#[derive(Debug)]
pub(super) struct FileNode {
    /// The same in every image of the file system.
    pub(super) number: u64,
    pub(super) content: Mutex<FileContent>,
    /// How many [`OpenNode`]s there are. The reference count does not tell: what a crash could bring
    /// back is referenced too.
    open_count: AtomicUsize,
}

impl FileNode {
    pub(super) fn new(number: u64, content: FileContent) -> Arc<FileNode> {
        Arc::new(FileNode {
            number,
            content: Mutex::new(content),
            open_count: AtomicUsize::new(0),
        })
    }

    /// Whether a handle, a mapping or a lock keeps the file alive without a name.
    pub(super) fn is_open(&self) -> bool {
        // Relaxed: only a number; callers hold the lock of the file system.
        self.open_count.load(Ordering::Relaxed) > 0
    }
}

/// A use of a file by something other than a name.
#[derive(Debug)]
pub(super) struct OpenNode(Arc<FileNode>);

impl OpenNode {
    pub(super) fn new(node: Arc<FileNode>) -> OpenNode {
        node.open_count.fetch_add(1, Ordering::Relaxed); // As in `is_open`.
        OpenNode(node)
    }

    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl Clone for OpenNode {
    fn clone(&self) -> OpenNode {
        OpenNode::new(Arc::clone(&self.0))
    }
}

impl Drop for OpenNode {
    fn drop(&mut self) {
        self.0.open_count.fetch_sub(1, Ordering::Relaxed); // As in `is_open`.
    }
}

impl Deref for OpenNode {
    type Target = FileNode;

    fn deref(&self) -> &FileNode {
        &self.0
    }
}

/// Names a directory independently of its path.
pub(super) type DirectoryId = u64;

/// The directory without a parent.
pub(super) const ROOT: DirectoryId = 0;

/// What a name stands for.
#[derive(Clone, Debug)]
pub(super) enum Node {
    File(Arc<FileNode>),
    Directory(DirectoryId),
}

impl Node {
    fn is_same(&self, other: &Node) -> bool {
        match (self, other) {
            (Node::File(a), Node::File(b)) => Arc::ptr_eq(a, b),
            (Node::Directory(a), Node::Directory(b)) => a == b,
            _ => false,
        }
    }
}

/// One change to the names of one directory. A rename is one change, so it is atomic.
#[derive(Clone, Debug)]
pub(super) struct Change {
    /// Equal in both directories of a rename between directories, else unique.
    pub(super) id: u64,
    /// Removed first, if it still stands for the node.
    pub(super) remove: Option<(String, Node)>,
    /// Inserted then, replacing what had the name.
    pub(super) insert: Option<(String, Node)>,
}

impl Change {
    pub(super) fn apply(&self, names: &mut BTreeMap<String, Node>) {
        if let Some((name, node)) = &self.remove
            && names.get(name).is_some_and(|found| found.is_same(node))
        {
            names.remove(name);
        }
        if let Some((name, node)) = &self.insert {
            names.insert(name.clone(), node.clone());
        }
    }
}

/// The names in one directory.
#[derive(Clone, Debug, Default)]
pub(super) struct Directory {
    pub(super) current: BTreeMap<String, Node>,
    pub(super) synced: BTreeMap<String, Node>,
    /// The way from `synced` to `current`.
    pub(super) pending: Vec<Change>,
}

/// All directories.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub(super) directories: HashMap<DirectoryId, Directory>,
    next_id: u64,
}

impl Tree {
    pub(super) fn new() -> Tree {
        Tree {
            directories: HashMap::from([(ROOT, Directory::default())]),
            next_id: ROOT + 1,
        }
    }

    /// A number for a change, a directory or a file, never used before.
    pub(super) fn new_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    /// Never gives a number again that the other tree gave.
    pub(super) fn reserve_ids_of(&mut self, other: &Tree) {
        self.next_id = self.next_id.max(other.next_id);
    }

    fn directory(&self, id: DirectoryId) -> &Directory {
        // A node refers only to directories that were inserted, and they are never taken out.
        &self.directories[&id]
    }

    fn change(
        &mut self,
        id: u64,
        directory: DirectoryId,
        remove: Option<(String, Node)>,
        insert: Option<(String, Node)>,
    ) {
        let change = Change { id, remove, insert };
        let directory = self.directories.entry(directory).or_default();
        change.apply(&mut directory.current);
        directory.pending.push(change);
    }

    /// What a path stands for.
    pub(super) fn find(&self, path: &Path) -> io::Result<Node> {
        let mut node = Node::Directory(ROOT);
        for name in components(path)? {
            let Node::Directory(id) = node else {
                return Err(io::ErrorKind::NotADirectory.into());
            };
            let names = &self.directory(id).current;
            node = names.get(&name).ok_or(io::ErrorKind::NotFound)?.clone();
        }
        Ok(node)
    }

    pub(super) fn find_file(&self, path: &Path) -> io::Result<Arc<FileNode>> {
        match self.find(path)? {
            Node::File(file) => Ok(file),
            Node::Directory(_) => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    /// How many names a file has now.
    pub(super) fn link_count(&self, file: &Arc<FileNode>) -> u64 {
        let is_name = |node: &&Node| matches!(node, Node::File(found) if Arc::ptr_eq(found, file));
        let directories = self.directories.values();
        let counts = directories.map(|it| it.current.values().filter(is_name).count());
        counts.sum::<usize>() as u64
    }

    pub(super) fn find_directory(&self, path: &Path) -> io::Result<DirectoryId> {
        match self.find(path)? {
            Node::Directory(id) => Ok(id),
            Node::File(_) => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    /// The directory that holds, or would hold, the last component; and that component.
    fn find_parent(&self, path: &Path) -> io::Result<(DirectoryId, String)> {
        let mut names = components(path)?;
        let name = names.pop().ok_or(io::ErrorKind::InvalidInput)?;
        let parent: std::path::PathBuf = names.iter().collect();
        Ok((self.find_directory(&parent)?, name))
    }

    /// Gives a file without this name the name.
    pub(super) fn insert_file(&mut self, path: &Path, file: Arc<FileNode>) -> io::Result<()> {
        let (parent, name) = self.find_parent(path)?;
        if self.directory(parent).current.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let id = self.new_id();
        self.change(id, parent, None, Some((name, Node::File(file))));
        Ok(())
    }

    pub(super) fn create_directory(&mut self, path: &Path) -> io::Result<()> {
        let mut parent = ROOT;
        for name in components(path)? {
            parent = match self.directory(parent).current.get(&name) {
                Some(Node::Directory(id)) => *id,
                Some(Node::File(_)) => return Err(io::ErrorKind::AlreadyExists.into()),
                None => {
                    let (id, change) = (self.new_id(), self.new_id());
                    self.directories.insert(id, Directory::default());
                    self.change(change, parent, None, Some((name, Node::Directory(id))));
                    id
                }
            };
        }
        Ok(())
    }

    pub(super) fn remove_file(&mut self, path: &Path) -> io::Result<()> {
        let node = Node::File(self.find_file(path)?);
        let (parent, name) = self.find_parent(path)?;
        let id = self.new_id();
        self.change(id, parent, Some((name, node)), None);
        Ok(())
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let node = self.find(from)?;
        let (from_parent, from_name) = self.find_parent(from)?;
        let (to_parent, to_name) = self.find_parent(to)?;
        match (self.directory(to_parent).current.get(&to_name), &node) {
            // Two names of one file: POSIX wants nothing to happen.
            (Some(existing), node) if existing.is_same(node) => return Ok(()),
            (Some(Node::Directory(_)), _) => return Err(io::ErrorKind::IsADirectory.into()),
            (Some(Node::File(_)), Node::Directory(_)) => {
                return Err(io::ErrorKind::NotADirectory.into());
            }
            (Some(Node::File(_)) | None, _) => {}
        }
        let id = self.new_id();
        let remove = Some((from_name, node.clone()));
        let insert = Some((to_name, node));
        if from_parent == to_parent {
            self.change(id, from_parent, remove, insert);
        } else {
            self.change(id, to_parent, None, insert);
            self.change(id, from_parent, remove, None);
        }
        Ok(())
    }

    /// Makes all changes to a directory durable.
    pub(super) fn sync_directory(&mut self, path: &Path) -> io::Result<()> {
        let id = self.find_directory(path)?;
        self.settle(id, self.directory(id).pending.len());
        Ok(())
    }

    /// Makes the first changes to a directory durable; and, before a file's removal because of a
    /// rename, its insertion in the other directory: a file system writes both at once.
    fn settle(&mut self, id: DirectoryId, count: usize) {
        let directory = self.directories.entry(id).or_default();
        let changes: Vec<Change> = directory.pending.drain(..count).collect();
        for change in &changes {
            change.apply(&mut directory.synced);
        }
        for change in changes.iter().filter(|change| change.insert.is_none()) {
            let insertion = self.directories.iter().find_map(|(&id, directory)| {
                let is_same = |other: &Change| other.id == change.id;
                Some((id, directory.pending.iter().position(is_same)? + 1))
            });
            if let Some((id, count)) = insertion {
                self.settle(id, count);
            }
        }
    }
}

/// The names along a path, from the root; a relative path starts there too.
fn components(path: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(
                name.to_str()
                    .ok_or(io::ErrorKind::InvalidInput)?
                    .to_string(),
            ),
            Component::ParentDir => {
                names.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    Ok(names)
}
