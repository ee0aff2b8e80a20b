//! Many changes at once: what they need is fetched for all of them before the first is made.
//!
//! A change of a tree that is larger than the processor's caches waits for its leaf, line after line. Here a group of
//! changes goes down the tree together, a level at a time; the lines of all of their leaves are then on their way at once.

use super::OrderedIndex;
use super::memory::Access;
use super::node::Node;
use super::sync::pin;

/// Changes that go down together. Their leaves fit the first-level cache, and their lines are more than a processor
/// fetches at once.
const GROUP: usize = 16;

/// What [`OrderedIndex::apply`] makes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change<'k> {
    pub(crate) key: &'k [u8],
    /// The position that the key gets; `None` removes it.
    pub(crate) position: Option<u64>,
}

impl OrderedIndex {
    /// Makes changes in their order, as [`OrderedIndex::insert`] and [`OrderedIndex::remove`].
    pub(crate) fn apply(&self, changes: &[Change<'_>]) {
        for group in changes.chunks(GROUP) {
            let guard = pin();
            let access = Access { guard: &guard };
            let leaves = self.fetch_leaves(group, access);
            // Together: to count is a locked instruction.
            let mut added = 0_u64;
            for (change, leaf) in group.iter().zip(leaves) {
                let difference = match change.position {
                    Some(position) => {
                        let previous = self.insert_from(leaf, change.key, position, access);
                        u64::from(previous.is_none())
                    }
                    None => match self.remove_from(leaf, change.key, access) {
                        Some(_) => u64::MAX, // minus one
                        None => 0,
                    },
                };
                added = added.wrapping_add(difference);
            }
            self.count(added);
        }
    }

    /// The leaf of each change, its lines on their way; `None` where somebody else changed the tree meanwhile, or a
    /// change of the group will find a way of its own.
    fn fetch_leaves<'g>(
        &self,
        group: &[Change<'_>],
        access: Access<'g>,
    ) -> [Option<Node<'g>>; GROUP] {
        let root = self.root.node(access.guard).ok().map(|(root, _)| root);
        let mut nodes = [root; GROUP];
        let mut is_descending = true;
        while is_descending {
            is_descending = false;
            for (change, node) in group.iter().zip(&mut nodes) {
                if let Some(inner) = node.filter(|node| !node.is_leaf()) {
                    let child = inner
                        .read()
                        .and_then(|version| self.child_for(change.key, inner, version, access));
                    *node = child.ok();
                    is_descending = true;
                }
            }
        }
        // The beginnings of the leaves are there by now, and say where the rest will be changed.
        for leaf in nodes.iter().take(group.len()).flatten() {
            access.fetch_insertion(*leaf);
        }
        nodes
    }
}
