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

/// One thing that a power loss may or may not keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CrashQuestion {
    /// How many of the unsynced changes to the names in a directory survive; 0 is none.
    Names {
        /// Number of the directory, the same in every image.
        directory: u64,
    },
    /// How long a file is: 0 is as it was synced, the last outcome is as it was written.
    Length {
        /// Number of the file, the same in every image.
        file: u64,
    },
    /// Whether a sector of 512 bytes is old (0) or new (1).
    Sector {
        /// Number of the file, the same in every image.
        file: u64,
        /// First byte of the sector.
        offset: u64,
    },
}

/// Decides what survives a power loss; see [`MemoryVfs::crash_image_with`](super::MemoryVfs::crash_image_with).
pub trait CrashChooser {
    /// Picks one of `choice_count` outcomes: 0 is "as it was synced", the last one is "as it was
    /// written". A number beyond counts as the last.
    fn choose(&mut self, question: CrashQuestion, choice_count: u64) -> u64;
}

/// A chooser from a function of question and number of outcomes.
impl<F: FnMut(CrashQuestion, u64) -> u64> CrashChooser for F {
    fn choose(&mut self, question: CrashQuestion, choice_count: u64) -> u64 {
        self(question, choice_count)
    }
}

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

impl<F: FnMut(&FileContent, u64) -> FileContent> Copier<F> {
    fn copy(&mut self, node: &Node) -> Node {
        match node {
            Node::Directory(id) => Node::Directory(*id),
            Node::File(file) => {
                let copy = self.copies.entry(Arc::as_ptr(file)).or_insert_with(|| {
                    let content = (self.copy_content)(&file.content.lock(), file.number);
                    FileNode::new(file.number, content)
                });
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
        copy_content: |content: &FileContent, _| content.deep_copy(),
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

/// What a power loss leaves, by a seed.
pub(super) fn crash_image(tree: &Tree, seed: u64) -> Tree {
    let mut draw = Draw { state: seed };
    let survivors = surviving_changes(tree, seed, &mut draw);
    build_image(tree, &survivors, |content, _| {
        FileContent::durable(surviving_bytes(content, seed, &mut draw))
    })
}

/// What a power loss leaves, as a chooser says.
pub(super) fn crash_image_with(tree: &Tree, chooser: &mut dyn CrashChooser) -> Tree {
    let survivors = chosen_changes(tree, chooser);
    build_image(tree, &survivors, |content, file| {
        content
            .only_survivor()
            .unwrap_or_else(|| FileContent::durable(chosen_bytes(content, file, chooser)))
    })
}

fn build_image(
    tree: &Tree,
    survivors: &HashMap<DirectoryId, usize>,
    copy_content: impl FnMut(&FileContent, u64) -> FileContent,
) -> Tree {
    let mut copier = Copier {
        copies: HashMap::new(),
        copy_content,
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
    keep_renamed_files(tree, &ids, &mut survivors);
    survivors
}

/// As [`surviving_changes`], as a chooser says.
fn chosen_changes(tree: &Tree, chooser: &mut dyn CrashChooser) -> HashMap<DirectoryId, usize> {
    let mut ids: Vec<_> = tree.directories.keys().copied().collect();
    ids.sort_unstable();
    let mut survivors = HashMap::new();
    for &id in &ids {
        let pending = tree.directories[&id].pending.len();
        let count = if pending == 0 {
            0
        } else {
            let question = CrashQuestion::Names { directory: id };
            let choice = chooser.choose(question, pending as u64 + 1);
            usize::try_from(choice).map_or(pending, |choice| choice.min(pending))
        };
        survivors.insert(id, count);
    }
    keep_renamed_files(tree, &ids, &mut survivors);
    survivors
}

/// A rename between directories: the removal must not survive without the insertion.
fn keep_renamed_files(
    tree: &Tree,
    ids: &[DirectoryId],
    survivors: &mut HashMap<DirectoryId, usize>,
) {
    // Cutting one directory's changes can undo an insertion that another one depends on, hence the loop.
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
        for &id in ids {
            let kept = &tree.directories[&id].pending[..survivors[&id]];
            if let Some(cut) = kept.iter().position(is_orphaned) {
                survivors.insert(id, cut);
                changed = true;
            }
        }
        if !changed {
            return;
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

/// As [`surviving_bytes`], as a chooser says.
fn chosen_bytes(content: &FileContent, file: u64, chooser: &mut dyn CrashChooser) -> Vec<u8> {
    let current = content.current();
    let synced = content.synced();
    let (shorter, longer) = (
        synced.len().min(current.len()),
        synced.len().max(current.len()),
    );
    let mut len = synced.len();
    if shorter < longer {
        // Both lengths, and those in between that end with a sector.
        let first = shorter / SECTOR_LEN_BYTES + 1;
        let between = (longer.div_ceil(SECTOR_LEN_BYTES)).saturating_sub(first);
        let count = between as u64 + 2;
        let choice = chooser.choose(CrashQuestion::Length { file }, count);
        if choice >= count - 1 {
            len = current.len();
        } else if choice > 0 {
            len = (first + choice as usize - 1) * SECTOR_LEN_BYTES;
        }
    }
    let mut survivor = synced.to_vec();
    survivor.resize(len, 0);
    for start in (0..len.min(current.len())).step_by(SECTOR_LEN_BYTES) {
        let range = start..(start + SECTOR_LEN_BYTES).min(len).min(current.len());
        if survivor[range.clone()] == current[range.clone()] {
            continue;
        }
        let offset = start as u64;
        if chooser.choose(CrashQuestion::Sector { file, offset }, 2) > 0 {
            survivor[range.clone()].copy_from_slice(&current[range]);
        }
    }
    survivor
}
