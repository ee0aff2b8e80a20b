//! Changes of the tree's form: nodes that grow, split, merge and shrink.
//!
//! All of them replace one or two neighbouring children of one parent by new nodes, under the locks
//! of the parent and of those children. The children become obsolete with that.
//!
//! INVARIANT: the range of keys that a node is responsible for never changes while it is not
//! obsolete. Nodes split into new ones, a node without entries disappears only by a merge with its
//! neighbour into a new one, and a parent's entry is only changed together with its child. So a
//! reader that came to a node by a validated parent is at the right node for its key as long as
//! the node itself is not obsolete: the parent need not be looked at again.
//!
//! Locks are only tried ([`super::version_lock::lock`]), so there is no order of locks to keep and no deadlock.

use std::ops::Range;

use super::OrderedIndex;
use super::contents::Contents;
use super::key::{common_prefix_len, separator};
use super::memory::{Access, Pointer};
use super::node::{
    Image, LINES_MAX, Node, PREFIX_LEN_MAX, Place, Shape, WORDS_MAX, WORDS_PER_LINE,
};
use super::version_lock::{Locked, Restart, Version, lock};

/// Insertions at one end of a leaf in a row after which it splits there instead of in the middle.
const RUN_MIN: u8 = 16;
/// A node that needs less than this is merged with a neighbour, if both then need at most three times as much.
const UNDERFULL_WORDS: usize = WORDS_MAX / 4;
/// What half of a split node gets in addition to what it needs, as a part of that: so it grows once before it splits. Growing by quarters
/// from what was needed took 2.6 B a key less, and a copy three times.
const SLACK_DIVISOR: usize = 4;
/// Words that a node rewritten in place must have free afterwards, lest it is rewritten for each key.
const FREE_WORDS_MIN: usize = WORDS_PER_LINE;

/// One node on the way from the root, and the entry that the way goes on with.
pub(super) struct Step<'g> {
    node: Node<'g>,
    version: Version,
    entry: usize,
}

/// The way from the root to a leaf.
pub(super) struct Path<'g> {
    root_version: Version,
    steps: Vec<Step<'g>>,
}

/// What leads to a node, locked.
enum Parent<'a, 'g> {
    Root(Locked<'a>),
    Node {
        node: Node<'g>,
        shape: Shape,
        entry: usize,
        locked: Locked<'g>,
    },
}

impl Parent<'_, '_> {
    fn release_unchanged(self) {
        match self {
            Parent::Root(locked) | Parent::Node { locked, .. } => locked.release_unchanged(),
        }
    }
}

impl OrderedIndex {
    /// The way to the leaf of `key`.
    fn path<'g>(&self, key: &[u8], access: Access<'g>) -> Result<Path<'g>, Restart> {
        let (mut node, root_version) = self.root.node(access.guard)?;
        let mut steps = Vec::new();
        loop {
            let version = node.read()?;
            let shape = node.shape()?;
            let entry = match node.search(shape, version, key, &access)? {
                _ if node.is_leaf() => 0,
                Place::Found(entry) => entry,
                Place::Absent(entry) => entry.checked_sub(1).ok_or(Restart)?,
            };
            steps.push(Step {
                node,
                version,
                entry,
            });
            if node.is_leaf() {
                return Ok(Path {
                    root_version,
                    steps,
                });
            }
            node = access.child(node, version, shape, entry)?;
        }
    }

    /// Locks what leads to the node at `level` of a path.
    fn lock_parent<'a, 'g>(
        &'a self,
        path: &Path<'g>,
        level: usize,
    ) -> Result<Parent<'a, 'g>, Restart> {
        let Some(above) = level.checked_sub(1) else {
            return Ok(Parent::Root(lock(&self.root.version, path.root_version)?));
        };
        let step = &path.steps[above];
        let locked = step.node.lock(step.version)?;
        Ok(Parent::Node {
            node: step.node,
            shape: step.node.shape()?,
            entry: step.entry,
            locked,
        })
    }

    /// Lets what leads to a node lead to `pointer` instead.
    fn replace(&self, parent: &Parent<'_, '_>, pointer: Pointer) -> Result<(), Restart> {
        match parent {
            Parent::Root(_) => self.root.set(pointer),
            Parent::Node {
                node, shape, entry, ..
            } => node.set_value(node.slot(*shape, *entry)?, pointer.word()),
        }
        Ok(())
    }

    /// Makes room for `key` in the leaf that is responsible for it. The caller then tries again.
    #[cold]
    pub(super) fn make_room_for(&self, key: &[u8], access: Access<'_>) -> Result<(), Restart> {
        let path = self.path(key, access)?;
        self.make_room(&path, path.steps.len() - 1, key, access)
    }

    /// Makes room for `key` in the node at `level`, or above it if that has to come first.
    fn make_room<'g>(
        &self,
        path: &Path<'g>,
        level: usize,
        key: &[u8],
        access: Access<'g>,
    ) -> Result<(), Restart> {
        let Step { node, version, .. } = path.steps[level];
        let parent = self.lock_parent(path, level)?;
        let locked = match node.lock(version) {
            Ok(locked) => locked,
            Err(Restart) => {
                parent.release_unchanged();
                return Err(Restart);
            }
        };
        let grown = (2 * node.lines()).min(LINES_MAX);
        // The root began with two entries, for which a prefix would have been too long.
        if node.lines() < LINES_MAX
            && (node.is_leaf() || level > 0)
            && let Some(image) = node.grown(node.shape()?, grown, key)?
        {
            self.replace(&parent, self.memory.allocate(&image, node.is_leaf()))?;
            self.memory.retire(node, locked, access.guard);
            return Ok(());
        }
        let shape = node.shape()?;
        if let Some(image) = node.compacted(shape, key, FREE_WORDS_MIN)? {
            parent.release_unchanged();
            node.overwrite(&image);
            return Ok(());
        }
        if let Some(cut) = cut(node, locked.version(), key, access)? {
            let [left, right] = cut.halves;
            let two = || {
                let left = node.part(shape, left.entries, left.lines)?;
                let right = node.part(shape, right.entries, right.lines)?;
                let allocate = |image: Image| self.memory.allocate(&image, true);
                Ok((allocate(left), allocate(right)))
            };
            let parting = (&cut.parting[..], None);
            return self.split(path, level, parting, (parent, locked), two, access);
        }
        let mut contents = Contents::default();
        contents.push_node(node, locked.version(), access, None)?;
        let all = 0..contents.len();
        let plan = contents.plan(all.clone(), node.is_leaf(), Some(key));
        if plan.words + FREE_WORDS_MIN <= node.words().len() {
            // There is enough, it only is unused or the prefix was too long.
            parent.release_unchanged();
            let words = contents.encode(all, node.is_leaf(), plan, node.lines(), &self.memory);
            node.overwrite(&words);
            return Ok(());
        }
        if node.lines() < LINES_MAX && plan.lines() <= LINES_MAX {
            let lines = grown.max(plan.lines()).min(LINES_MAX);
            let words = contents.encode(all, node.is_leaf(), plan, lines, &self.memory);
            let pointer = self.memory.allocate(&words, node.is_leaf());
            self.replace(&parent, pointer)?;
            self.memory.retire(node, locked, access.guard);
            return Ok(());
        }
        let is_leaf = node.is_leaf();
        let (at, parting) = split_point(&contents, node.shape()?, is_leaf, key);
        let goes_right = key >= parting;
        let two = || {
            let (left, right) = (0..at, at..contents.len());
            let left = self.half(&contents, left, is_leaf, (!goes_right).then_some(key));
            let right = self.half(&contents, right, is_leaf, goes_right.then_some(key));
            Ok((left, right))
        };
        // The key that parts inner nodes is in none of them.
        let left_out = if is_leaf { None } else { contents.apart(at) };
        self.split(
            path,
            level,
            (parting, left_out),
            (parent, locked),
            two,
            access,
        )
    }

    /// Replaces the node at `level` by `two`, if there is room for that in its parent. `left_out`: where a key is stored apart that
    /// the two do not have; the parent has a copy of its own.
    fn split<'a, 'g>(
        &'a self,
        path: &Path<'g>,
        level: usize,
        (parting, left_out): (&[u8], Option<u64>),
        (parent, locked): (Parent<'a, 'g>, Locked<'g>),
        two: impl FnOnce() -> Result<(Pointer, Pointer), Restart>,
        access: Access<'g>,
    ) -> Result<(), Restart> {
        if let Parent::Node {
            node: above, shape, ..
        } = &parent
            && !above.has_room(*shape, parting)?
        {
            locked.release_unchanged();
            parent.release_unchanged();
            self.make_room(path, level - 1, parting, access)?;
            return Err(Restart);
        }
        let (left, right) = two()?;
        self.replace_by_two(parent, left, parting, right)?;
        if let Some(address) = left_out {
            self.memory.retire_apart(address, access.guard);
        }
        let node = path.steps[level].node;
        self.memory.retire(node, locked, access.guard);
        Ok(())
    }

    /// A new node of some entries, with room for a key.
    fn half(
        &self,
        contents: &Contents,
        range: Range<usize>,
        is_leaf: bool,
        pending: Option<&[u8]>,
    ) -> Pointer {
        let plan = contents.plan(range.clone(), is_leaf, pending);
        let words = contents.encode(range, is_leaf, plan, lines_for(plan.words), &self.memory);
        self.memory.allocate(&words, is_leaf)
    }

    /// Lets a parent lead to two nodes where it led to one.
    fn replace_by_two(
        &self,
        parent: Parent<'_, '_>,
        left: Pointer,
        parting: &[u8],
        right: Pointer,
    ) -> Result<(), Restart> {
        match &parent {
            Parent::Root(_) => {
                let mut contents = Contents::default();
                contents.push(&[], left.word(), None);
                contents.push(parting, right.word(), None);
                let root = self.half(&contents, 0..2, false, None);
                self.root.set(root);
            }
            Parent::Node {
                node, shape, entry, ..
            } => {
                self.replace(&parent, left)?;
                let apart = node.must_be_apart(*shape, parting);
                let address = apart.then(|| self.memory.store_apart(parting));
                node.insert(*shape, entry + 1, parting, right.word(), address);
            }
        }
        Ok(())
    }

    /// Merges what became too small on the way to `key`; true if there may be more to do.
    pub(super) fn merge_for(&self, key: &[u8], access: Access<'_>) -> Result<bool, Restart> {
        let path = self.path(key, access)?;
        for level in (0..path.steps.len()).rev() {
            let node = path.steps[level].node;
            let shape = node.shape()?;
            node.validate(path.steps[level].version)?;
            if level == 0 {
                if !node.is_leaf() && shape.count == 1 {
                    self.remove_root(&path, access)?;
                    return Ok(true);
                }
                return Ok(false);
            }
            if shape.needed_words() < UNDERFULL_WORDS
                && (self.merge(&path, level, true, access)?
                    || self.merge(&path, level, false, access)?)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Lets the tree begin at the only child of its root.
    fn remove_root(&self, path: &Path<'_>, access: Access<'_>) -> Result<(), Restart> {
        let Step { node, version, .. } = path.steps[0];
        let root = lock(&self.root.version, path.root_version)?;
        let locked = match node.lock(version) {
            Ok(locked) => locked,
            Err(Restart) => {
                root.release_unchanged();
                return Err(Restart);
            }
        };
        self.root.set(Pointer::of(node.value(node.shape()?, 0)?));
        self.memory.retire(node, locked, access.guard);
        drop(root);
        Ok(())
    }

    /// Merges the node at `level` with its right or left neighbour, if both fit one node.
    fn merge<'g>(
        &self,
        path: &Path<'g>,
        level: usize,
        with_right: bool,
        access: Access<'g>,
    ) -> Result<bool, Restart> {
        let above = &path.steps[level - 1];
        let shape = above.node.shape()?;
        above.node.validate(above.version)?;
        let left_entry = match (with_right, above.entry) {
            (true, entry) if entry + 1 < shape.count => entry,
            (false, entry) if entry > 0 => entry - 1,
            _ => return Ok(false),
        };
        let left = access.child(above.node, above.version, shape, left_entry)?;
        let right = access.child(above.node, above.version, shape, left_entry + 1)?;
        let (left_version, right_version) = (left.read()?, right.read()?);
        let (left_shape, right_shape) = (left.shape()?, right.shape()?);
        let together = left_shape.needed_words() + right_shape.needed_words();
        let smaller_count = left_shape.count.min(right_shape.count);
        left.validate(left_version)?;
        right.validate(right_version)?;
        if together > 3 * UNDERFULL_WORDS && smaller_count > 0 {
            return Ok(false);
        }
        let parent = above.node.lock(above.version)?;
        let locks = left
            .lock(left_version)
            .and_then(|left| match right.lock(right_version) {
                Ok(right) => Ok((left, right)),
                Err(Restart) => {
                    left.release_unchanged();
                    Err(Restart)
                }
            });
        let (left_lock, right_lock) = match locks {
            Ok(locks) => locks,
            Err(Restart) => {
                parent.release_unchanged();
                return Err(Restart);
            }
        };
        self.merge_locked(
            above.node,
            shape,
            left_entry,
            (left, left_lock),
            (right, right_lock),
            (parent, access),
        )
    }

    /// Replaces two children of `above` by one; all three are locked.
    fn merge_locked<'g>(
        &self,
        above: Node<'g>,
        shape: Shape,
        left_entry: usize,
        (left, left_lock): (Node<'g>, Locked<'g>),
        (right, right_lock): (Node<'g>, Locked<'g>),
        (parent, access): (Locked<'g>, Access<'g>),
    ) -> Result<bool, Restart> {
        let mut prefix = [0; PREFIX_LEN_MAX];
        let prefix = above.prefix(shape, &mut prefix)?;
        let mut parting = Vec::new();
        let version = parent.version();
        let right_entry = left_entry + 1;
        above.copy_key(shape, version, right_entry, prefix, &access, &mut parting)?;
        let mut contents = Contents::default();
        contents.push_node(left, left_lock.version(), access, None)?;
        contents.push_node(right, right_lock.version(), access, Some((&parting, None)))?;
        let all = 0..contents.len();
        let plan = contents.plan(all.clone(), left.is_leaf(), None);
        if plan.lines() > LINES_MAX {
            // Without the longer prefixes of before they do not fit.
            left_lock.release_unchanged();
            right_lock.release_unchanged();
            parent.release_unchanged();
            return Ok(false);
        }
        let words = contents.encode(all, left.is_leaf(), plan, plan.lines(), &self.memory);
        let merged = self.memory.allocate(&words, left.is_leaf());
        let apart = above.apart_address(shape, right_entry)?;
        above.set_value(above.slot(shape, left_entry)?, merged.word());
        above.remove(shape, right_entry)?;
        if let Some(address) = apart {
            self.memory.retire_apart(address, access.guard);
        }
        self.memory.retire(left, left_lock, access.guard);
        self.memory.retire(right, right_lock, access.guard);
        drop(parent);
        Ok(true)
    }
}

/// Whether a node should be merged with a neighbour.
pub(super) fn is_small(node: Node<'_>) -> Result<bool, Restart> {
    Ok(node.shape()?.needed_words() < UNDERFULL_WORDS)
}

/// Cache lines of a half that needs so many words.
fn lines_for(words: usize) -> usize {
    let lines = words.div_ceil(WORDS_PER_LINE);
    (lines + lines / SLACK_DIVISOR).min(LINES_MAX)
}

/// How a leaf splits whose halves keep its prefix.
struct Cut {
    halves: [Half; 2],
    parting: Vec<u8>,
}

struct Half {
    entries: Range<usize>,
    lines: usize,
}

/// How a full leaf splits so that both halves, with `key`, are copies of what it has, as most do: to take all keys out and put them in again takes ten
/// times as long. `None` if more than that is to be done. The leaf is locked.
fn cut<'g>(
    leaf: Node<'g>,
    version: Version,
    key: &[u8],
    access: Access<'g>,
) -> Result<Option<Cut>, Restart> {
    let shape = leaf.shape()?;
    let is_plain = leaf.is_leaf()
        && leaf.lines() == LINES_MAX
        && shape.count > 1
        && shape.run.unsigned_abs() < RUN_MIN
        && leaf.has_prefix_of(shape, key)?;
    if !is_plain {
        return Ok(None);
    }
    let mut prefix = [0; PREFIX_LEN_MAX];
    let prefix = leaf.prefix(shape, &mut prefix)?;
    let key_of = |entry| {
        let mut key = Vec::new();
        leaf.copy_key(shape, version, entry, prefix, &access, &mut key)?;
        Ok(key)
    };
    let at = leaf.middle(shape)?.clamp(1, shape.count - 1);
    let (left_last, right_first) = (key_of(at - 1)?, key_of(at)?);
    let parting = separator(&left_last, &right_first).to_vec();
    let goes_right = key >= parting.as_slice();
    let half = |entries: Range<usize>, one: &[u8], other: &[u8], gets_key: bool| {
        let pending = gets_key.then_some(key);
        let common =
            common_prefix_len(one, other).min(common_prefix_len(one, pending.unwrap_or(one)));
        let words = |prefix_len| leaf.words_of(shape, entries.clone(), pending, prefix_len);
        let kept = words(shape.prefix_len)?;
        let is_best = words(common.min(PREFIX_LEN_MAX))?.min(words(0)?) >= kept;
        let lines = lines_for(kept);
        Ok(is_best.then_some(Half { entries, lines }))
    };
    let left = half(0..at, &left_last, &key_of(0)?, !goes_right)?;
    let last = key_of(shape.count - 1)?;
    let right = half(at..shape.count, &right_first, &last, goes_right)?;
    Ok(left.zip(right).map(|(left, right)| Cut {
        halves: [left, right],
        parting,
    }))
}

/// The first entry of the right half, and what parts the halves. Each fits a node, also with `key`.
fn split_point<'a>(
    contents: &'a Contents,
    shape: Shape,
    is_leaf: bool,
    key: &'a [u8],
) -> (usize, &'a [u8]) {
    let (len, least) = (contents.len(), usize::from(!is_leaf));
    if shape.run.unsigned_abs() < RUN_MIN && key.starts_with(contents.source_prefix()) {
        let at = contents.middle().clamp(1, len - 1);
        return match is_leaf {
            true => (at, separator(contents.key(at - 1), contents.key(at))),
            false => (at, contents.key(at)),
        };
    }
    // A stream that rises or falls leaves full nodes behind. And a key without the prefix of the
    // others, before or behind all of them, must not make them longer. Either way `key` goes to
    // the smaller part, which may have no other entry; an inner node has one child at least.
    let at = contents.lower_bound(key, least);
    let goes_right = at >= len / 2;
    if is_leaf && goes_right {
        return (at, separator(contents.key(at - 1), key));
    }
    if is_leaf {
        return (at, separator(key, contents.key(at)));
    }
    let at = (at - usize::from(goes_right)).clamp(1, len - 1);
    (at, contents.key(at))
}
