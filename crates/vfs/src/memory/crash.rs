//! What is left after a crash: the fault model of the memory file system.
//!
//! # Power loss
//!
//! A file keeps every synced byte. Of the rest, each 512-byte sector is independently old or new, the
//! length is the old one, the new one or one in between, and nothing links one file's fate to
//! another's: the device may have written the last change first. A directory keeps its synced names
//! and a prefix of the changes since; different directories are independent, except that a file that
//! is renamed between two of them is never lost from both. A file whose name survives without its
//! content is an empty file.
//!
//! The draw is a function of the seed. Seed 0 loses everything that was not synced, seed 1 keeps
//! everything; every other seed first draws how a file fares (all, nothing, a beginning, an end, one
//! sector missing, each sector by itself), because the orders of events that break a store are rare
//! among independent draws.
//!
//! # Death of the process
//!
//! Nothing is lost, but what was not synced is still not synced: a later power loss may take it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::file::{FileContent, SECTOR_LEN_BYTES};
use super::tree::{Change, Directory, DirectoryId, FileNode, Node, ROOT, Tree};

/// SplitMix64: enough for drawing crash images, the same on every machine.
struct Draw {
    state: u64,
}

impl Draw {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Uniform in `0..bound`; 0 for a bound of 0.
    fn below(&mut self, bound: usize) -> usize {
        if bound == 0 {
            0
        } else {
            (self.next() % bound as u64) as usize
        }
    }

    fn chance(&mut self, eighths: usize) -> bool {
        self.below(8) < eighths
    }
}

/// Which of a number of unsynced pieces survive.
enum Fate {
    Lost,
    Kept,
    /// The first so many.
    Beginning(usize),
    /// All but the first so many.
    End(usize),
    /// All but one.
    AllBut(usize),
    /// Each with a probability of so many eighths.
    Each(usize),
}

impl Fate {
    fn draw(seed: u64, draw: &mut Draw, pieces: usize) -> Fate {
        match seed {
            0 => return Fate::Lost,
            1 => return Fate::Kept,
            _ => {}
        }
        match draw.below(8) {
            0 => Fate::Lost,
            1 => Fate::Kept,
            2 => Fate::Beginning(draw.below(pieces + 1)),
            3 => Fate::End(draw.below(pieces + 1)),
            4 => Fate::AllBut(draw.below(pieces)),
            5 => Fate::Each(1),
            6 => Fate::Each(7),
            _ => Fate::Each(4),
        }
    }

    fn keeps(&self, piece: usize, draw: &mut Draw) -> bool {
        match *self {
            Fate::Lost => false,
            Fate::Kept => true,
            Fate::Beginning(count) => piece < count,
            Fate::End(count) => piece >= count,
            Fate::AllBut(lost) => piece != lost,
            Fate::Each(eighths) => draw.chance(eighths),
        }
    }
}

/// Copies each file once, whatever its number of names, so that hard links stay links.
struct Copier<F> {
    copies: HashMap<*const FileNode, Arc<FileNode>>,
    copy_content: F,
}

impl<F: FnMut(&FileContent) -> FileContent> Copier<F> {
    fn copy(&mut self, node: &Node) -> Node {
        match node {
            Node::Directory(id) => Node::Directory(*id),
            Node::File(file) => {
                let copy = self
                    .copies
                    .entry(Arc::as_ptr(file))
                    .or_insert_with(|| FileNode::new((self.copy_content)(&file.content.lock())));
                Node::File(Arc::clone(copy))
            }
        }
    }

    fn copy_names(&mut self, names: &BTreeMap<String, Node>) -> BTreeMap<String, Node> {
        names
            .iter()
            .map(|(name, node)| (name.clone(), self.copy(node)))
            .collect()
    }
}

/// What kill -9 leaves.
pub(super) fn kill_image(tree: &Tree) -> Tree {
    let mut copier = Copier {
        copies: HashMap::new(),
        copy_content: FileContent::deep_copy,
    };
    let mut image = tree.clone();
    for directory in image.directories.values_mut() {
        directory.current = copier.copy_names(&directory.current);
        directory.synced = copier.copy_names(&directory.synced);
        for change in &mut directory.pending {
            for (_, node) in change.remove.iter_mut().chain(&mut change.insert) {
                *node = copier.copy(node);
            }
        }
    }
    image
}

/// What a power loss leaves.
pub(super) fn crash_image(tree: &Tree, seed: u64) -> Tree {
    let mut draw = Draw { state: seed };
    let survivors = surviving_changes(tree, seed, &mut draw);
    let mut copier = Copier {
        copies: HashMap::new(),
        copy_content: |content: &FileContent| {
            FileContent::durable(surviving_bytes(content, seed, &mut draw))
        },
    };
    let mut image = Tree::new();
    // Only what can be reached exists: a directory whose name was lost is lost with all it holds.
    let mut open = vec![ROOT];
    while let Some(id) = open.pop() {
        let Some(directory) = tree.directories.get(&id) else {
            continue;
        };
        let mut names = directory.synced.clone();
        for change in &directory.pending[..survivors[&id]] {
            change.apply(&mut names);
        }
        let names = copier.copy_names(&names);
        open.extend(names.values().filter_map(|node| match node {
            Node::Directory(id) => Some(*id),
            Node::File(_) => None,
        }));
        let survivor = Directory {
            current: names.clone(),
            synced: names,
            pending: Vec::new(),
        };
        image.directories.insert(id, survivor);
    }
    image.reserve_ids_of(tree);
    image
}

/// How many of the pending changes of each directory survive.
fn surviving_changes(tree: &Tree, seed: u64, draw: &mut Draw) -> HashMap<DirectoryId, usize> {
    let mut ids: Vec<_> = tree.directories.keys().copied().collect();
    ids.sort_unstable(); // The order of a hash map is not a function of the seed.
    let mut survivors = HashMap::new();
    for &id in &ids {
        let pending = tree.directories[&id].pending.len();
        let count = match Fate::draw(seed, draw, pending) {
            Fate::Lost => 0,
            Fate::Kept => pending,
            _ => draw.below(pending + 1),
        };
        survivors.insert(id, count);
    }
    // A rename between directories: the removal must not survive without the insertion. Cutting one
    // directory's changes can undo an insertion that another one depends on, hence the loop.
    loop {
        let lost_insertions: Vec<u64> = ids
            .iter()
            .flat_map(|id| &tree.directories[id].pending[survivors[id]..])
            .filter(|change| change.insert.is_some() && change.remove.is_none())
            .map(|change| change.id)
            .collect();
        let is_orphaned =
            |change: &Change| change.insert.is_none() && lost_insertions.contains(&change.id);
        let mut changed = false;
        for &id in &ids {
            let kept = &tree.directories[&id].pending[..survivors[&id]];
            if let Some(cut) = kept.iter().position(is_orphaned) {
                survivors.insert(id, cut);
                changed = true;
            }
        }
        if !changed {
            return survivors;
        }
    }
}

/// Old and new bytes mixed.
fn surviving_bytes(content: &FileContent, seed: u64, draw: &mut Draw) -> Vec<u8> {
    let current = content.current();
    let synced = content.synced();
    let len = match seed {
        0 => synced.len(),
        1 => current.len(),
        _ => match draw.below(3) {
            0 => synced.len(),
            1 => current.len(),
            _ => {
                let shorter = synced.len().min(current.len());
                let longer = synced.len().max(current.len());
                let sectors = (longer - shorter) / SECTOR_LEN_BYTES;
                shorter + draw.below(sectors + 1) * SECTOR_LEN_BYTES
            }
        },
    };
    let mut survivor = synced.to_vec();
    survivor.resize(len, 0);
    let changed: Vec<_> = (0..len.min(current.len()))
        .step_by(SECTOR_LEN_BYTES)
        .map(|start| start..(start + SECTOR_LEN_BYTES).min(len).min(current.len()))
        .filter(|range| survivor[range.clone()] != current[range.clone()])
        .collect();
    let fate = Fate::draw(seed, draw, changed.len());
    for (piece, range) in changed.into_iter().enumerate() {
        if fate.keeps(piece, draw) {
            survivor[range.clone()].copy_from_slice(&current[range]);
        }
    }
    survivor
}
