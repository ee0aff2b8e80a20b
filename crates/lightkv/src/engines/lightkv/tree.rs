//! The radix part of the radix-hash tree: which partition owns a key.
//!
//! # STRUCTURE
//!
//! The key space is cut into half-open ranges, each owned by one leaf; the set of their lower
//! bounds is the truth, and the tree only answers, quickly, which leaf has the greatest lower
//! bound that is not above a key. An inner node looks at one byte of the key (the paper's s = 8):
//!
//! ```text
//!   Inner   prefix "ser"      bytes every key below this node shares, compared in one go
//!           below  ─> leaf A  keys that sort before the prefix
//!           above  ─> leaf D  keys that sort after it
//!           slots  [u8; 256]  value of the next byte -> number of a run
//!                    │
//!                    └─> children, one per run of values: [leaf A][inner node][leaf C] ...
//! ```
//!
//! Runs of byte values share a child, so a node costs 256 B and 16 B a run, not 256 pointers,
//! and a copy of a node touches one reference count a run. The same leaf may hang from several
//! nodes, where its range crosses the edge of one.
//!
//! Keys are compared as if zeros followed their last byte for ever, and a bound never ends in a
//! zero byte ([`normalize_bound`]). Under this rule a bound and a key compare exactly as plain
//! byte strings do, while inside the tree every key has a byte at every depth.
//!
//! Whatever the order of the assignments that led to a tree, it stays small:
//! - neighbouring runs of one node are different children;
//! - no node routes all its values to one leaf: it would be that leaf;
//! - a node that leads to one other node only is merged with it, if one leaf owns all before
//!   that node's prefix and one all behind it.
//!
//! So there are never more than two inner nodes to a bound. (Two histories of the same bounds may still
//! differ in where a prefix ends. One canonical shape would cost its locality: with bounds `a`,
//! `aa`, `aaa`, ... a change at the root would move a byte in every node below.)
//!
//! # CONCURRENCY
//!
//! None is left: a [`Tree`] never changes. [`Tree::assign`] copies the nodes on the path to the
//! change and shares all others with the old tree. Whoever publishes a new tree keeps the old
//! one alive for as long as readers may use it; [`Tree::route`] is plain loads.

use std::cmp::Ordering;
use std::sync::Arc;

/// An immutable map from keys to the leaves that own their ranges; see the head of this file.
pub(crate) struct Tree<L> {
    root: Child<L>,
}

/// What a run of byte values leads to.
enum Child<L> {
    Leaf(Arc<L>),
    Inner(Arc<Inner<L>>),
}

struct Inner<L> {
    prefix: Box<[u8]>,
    /// The number of the run a byte value belongs to, an index into `children`.
    slots: [u8; 256],
    /// In the order of the values, so also in the order of the keys.
    children: Box<[Child<L>]>,
    /// The owner of the keys before `prefix`; `None` if there are none (a prefix of zeros only).
    below: Option<Arc<L>>,
    /// The owner of the keys after `prefix`; `None` if there are none (a prefix of 0xff only).
    above: Option<Arc<L>>,
}

/// `bound` without the zeros at its end, which would not change what it means.
pub(crate) fn normalize_bound(bound: &[u8]) -> &[u8] {
    let len = bound
        .iter()
        .rposition(|&byte| byte != 0)
        .map_or(0, |last| last + 1);
    &bound[..len]
}

impl<L> Tree<L> {
    /// A tree in which `only` owns every key.
    pub(crate) fn new(only: Arc<L>) -> Tree<L> {
        Tree {
            root: Child::Leaf(only),
        }
    }

    /// The tree of `leaves`, each given with its lower bound, in ascending order.
    ///
    /// The first bound must be empty: every key has an owner. At least one leaf is needed.
    pub(crate) fn from_sorted(leaves: Vec<(Vec<u8>, Arc<L>)>) -> Tree<L> {
        debug_assert!(
            leaves
                .first()
                .is_some_and(|(lower, _)| normalize_bound(lower).is_empty())
        );
        debug_assert!(leaves.is_sorted_by(|a, b| normalize_bound(&a.0) < normalize_bound(&b.0)));
        let mut leaves = leaves.into_iter();
        let (_, first) = leaves.next().expect("a tree has at least one leaf");
        leaves.fold(Tree::new(first), |tree, (lower, leaf)| {
            tree.assign(&lower, None, leaf)
        })
    }

    /// The leaf that owns `key`.
    #[inline]
    pub(crate) fn route(&self, key: &[u8]) -> &Arc<L> {
        let mut rest = key;
        let mut child = &self.root;
        loop {
            let inner = match child {
                Child::Leaf(leaf) => return leaf,
                Child::Inner(inner) => inner,
            };
            if !inner.prefix.is_empty() {
                match rest.strip_prefix(&*inner.prefix) {
                    Some(behind) => rest = behind,
                    None => match inner.outside(rest) {
                        Some(leaf) => return leaf,
                        None => rest = &[],
                    },
                }
            }
            let (value, behind) = first_byte(rest);
            child = inner.child(value);
            rest = behind;
        }
    }

    /// A tree in which `leaf` owns the keys of `lower..upper` and everything else is as before.
    ///
    /// No `upper` means up to the last key. Costs a copy of the nodes on the paths to the two
    /// bounds. An empty range changes nothing.
    pub(crate) fn assign(&self, lower: &[u8], upper: Option<&[u8]>, leaf: Arc<L>) -> Tree<L> {
        let lower = normalize_bound(lower);
        let upper = upper.map(normalize_bound);
        if upper.is_some_and(|upper| upper <= lower) {
            return self.clone();
        }
        Tree {
            root: assign(self.root.clone(), lower, upper, &leaf),
        }
    }

    /// The leaves in the order of their keys, each once (twice only where another leaf owns keys
    /// between two ranges of the same one).
    pub(crate) fn leaves(&self) -> Leaves<'_, L> {
        Leaves {
            pending: vec![Step::of(&self.root)],
            last: None,
        }
    }

    /// Number of leaves, as [`Tree::leaves`] counts them. Walks the tree.
    pub(crate) fn leaf_count(&self) -> usize {
        self.leaves().count()
    }

    /// Number of inner nodes. Walks the tree.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn inner_nodes(&self) -> usize {
        let mut count = 0;
        self.for_each_inner(|_, _| count += 1);
        count
    }

    /// The greatest number of inner nodes between the root and a leaf. Walks the tree.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn depth(&self) -> usize {
        let mut depth_max = 0;
        self.for_each_inner(|_, depth| depth_max = depth_max.max(depth));
        depth_max
    }

    /// Bytes of memory of the tree without its leaves, also of nodes shared with other trees.
    pub(crate) fn memory_bytes(&self) -> usize {
        /// The two reference counts in front of what an `Arc` points to.
        const COUNTS_BYTES: usize = 2 * size_of::<usize>();
        let mut total_bytes = size_of::<Self>();
        self.for_each_inner(|inner, _| {
            total_bytes += COUNTS_BYTES
                + size_of::<Inner<L>>()
                + size_of_val(&*inner.prefix)
                + size_of_val(&*inner.children);
        });
        total_bytes
    }

    /// Calls `visit` with every inner node and its depth, the root's being 1.
    fn for_each_inner(&self, mut visit: impl FnMut(&Inner<L>, usize)) {
        // A stack of our own: hostile keys can make the tree as deep as it has leaves.
        let mut pending = vec![(&self.root, 1)];
        while let Some((child, depth)) = pending.pop() {
            if let Child::Inner(inner) = child {
                visit(inner, depth);
                pending.extend(inner.children.iter().map(|child| (child, depth + 1)));
            }
        }
    }
}

impl<L> Clone for Tree<L> {
    fn clone(&self) -> Self {
        Tree {
            root: self.root.clone(),
        }
    }
}

impl<L> Child<L> {
    /// Whether both are the same leaf. The same inner node never hangs in two places.
    fn is_same_leaf(&self, other: &Child<L>) -> bool {
        matches!((self, other), (Child::Leaf(a), Child::Leaf(b)) if Arc::ptr_eq(a, b))
    }
}

impl<L> Clone for Child<L> {
    fn clone(&self) -> Self {
        match self {
            Child::Leaf(leaf) => Child::Leaf(Arc::clone(leaf)),
            Child::Inner(inner) => Child::Inner(Arc::clone(inner)),
        }
    }
}

impl<L> Inner<L> {
    #[inline]
    fn child(&self, value: u8) -> &Child<L> {
        &self.children[usize::from(self.slots[usize::from(value)])]
    }

    /// The owner of a key that does not start with the prefix; `None` if only zeros are missing.
    fn outside(&self, key: &[u8]) -> Option<&Arc<L>> {
        match compare_padded(key, &self.prefix) {
            Ordering::Less => self.below.as_ref(),
            Ordering::Equal => None,
            Ordering::Greater => self.above.as_ref(),
        }
    }
}

impl<L> Drop for Inner<L> {
    /// Frees a tree that only this node kept alive without recursion: it can be very deep.
    fn drop(&mut self) {
        let mut doomed = std::mem::take(&mut self.children).into_vec();
        while let Some(child) = doomed.pop() {
            if let Child::Inner(inner) = child
                && let Some(mut inner) = Arc::into_inner(inner)
            {
                doomed.extend(std::mem::take(&mut inner.children));
            }
        }
    }
}

/// The child that owns what `child` owned, except that `leaf` has taken `lower..upper`.
///
/// Bounds are relative to the place of `child`: the bytes on the way to it are cut off. An empty
/// `lower` is therefore the first key below `child`, no `upper` the end. The range is not empty.
///
/// Walks down along the bounds, opening each node on the way, until what is left of the range is
/// a whole child; then seals the opened nodes from the bottom up. Where the two bounds part, the
/// lower one is followed by a call of its own, which cannot part again: so the recursion is one
/// call deep, however deep the tree is.
fn assign<L>(
    mut child: Child<L>,
    mut lower: &[u8],
    mut upper: Option<&[u8]>,
    leaf: &Arc<L>,
) -> Child<L> {
    let mut opened: Vec<(Draft<L>, u8)> = Vec::new();
    let mut assigned = loop {
        if lower.is_empty() && upper.is_none() {
            break Child::Leaf(Arc::clone(leaf));
        }
        let mut draft = Draft::open(&child, lower, upper);

        // From here on the bounds are relative to the node's slots. A bound at the far end of
        // the child lies outside of the node's prefix, and takes what is beside it along.
        let prefix_len = draft.prefix.len();
        if lower.is_empty() {
            draft.below = draft.below.map(|_| Arc::clone(leaf));
        } else {
            lower = lower.get(prefix_len..).unwrap_or(&[]);
        }
        match upper {
            None => draft.above = draft.above.map(|_| Arc::clone(leaf)),
            Some(bound) => upper = Some(bound.get(prefix_len..).unwrap_or(&[])),
        }
        if upper.is_some_and(<[u8]>::is_empty) {
            break draft.seal(); // the range ended where the prefix starts
        }

        let (first, lower_rest) = first_byte(lower);
        let (last, upper_rest) = match upper {
            None => (u8::MAX, None),
            Some(bound) => {
                let (value, rest) = first_byte(bound);
                (value, Some(rest))
            }
        };
        if first == last {
            child = draft.child(first).clone();
            opened.push((draft, first));
            (lower, upper) = (lower_rest, upper_rest);
            continue;
        }
        for value in first..last {
            if value > first || lower_rest.is_empty() {
                draft.set(value, Child::Leaf(Arc::clone(leaf)));
            }
        }
        match upper_rest {
            None => draft.set(last, Child::Leaf(Arc::clone(leaf))),
            Some([]) => {} // the range ends where the values of `last` begin
            Some(_) if lower_rest.is_empty() => {
                child = draft.child(last).clone();
                opened.push((draft, last));
                (lower, upper) = (&[], upper_rest);
                continue;
            }
            Some(_) => {
                let upper_part = assign(draft.child(last).clone(), &[], upper_rest, leaf);
                draft.set(last, upper_part);
            }
        }
        if lower_rest.is_empty() {
            break draft.seal();
        }
        child = draft.child(first).clone();
        opened.push((draft, first));
        (lower, upper) = (lower_rest, None);
    };
    while let Some((mut draft, value)) = opened.pop() {
        draft.set(value, assigned);
        assigned = draft.seal();
    }
    assigned
}

/// An inner node while it is being changed: as [`Inner`], but larger than it need be.
struct Draft<L> {
    prefix: Vec<u8>,
    /// Indices into `children`, in no order.
    slots: [u16; 256],
    children: Vec<Child<L>>,
    below: Option<Arc<L>>,
    above: Option<Arc<L>>,
}

impl<L> Draft<L> {
    /// A node that owns what `child` owns, with a prefix that every bound of `lower..upper` that
    /// lies inside the child starts with. At least one does.
    fn open(child: &Child<L>, lower: &[u8], upper: Option<&[u8]>) -> Draft<L> {
        let inside = [Some(lower).filter(|bound| !bound.is_empty()), upper];
        let inside = inside.iter().flatten();
        match child {
            Child::Leaf(leaf) => {
                // The last byte of the shorter bound must be left for the slots.
                let shortest = inside.clone().min_by_key(|bound| bound.len());
                let prefix = shortest.map_or(&[][..], |bound| &bound[..bound.len() - 1]);
                let shared = inside
                    .map(|bound| shared_len(prefix, bound))
                    .min()
                    .unwrap_or(0);
                Draft::uniform(prefix[..shared].to_vec(), leaf)
            }
            Child::Inner(inner) => {
                let shared = inside.map(|bound| shared_len(&inner.prefix, bound)).min();
                Draft::open_at(inner, shared.unwrap_or(inner.prefix.len()))
            }
        }
    }

    /// A node all of whose keys belong to `leaf`, and those around it as well.
    fn uniform(prefix: Vec<u8>, leaf: &Arc<L>) -> Draft<L> {
        Draft {
            below: Some(Arc::clone(leaf)).filter(|_| has_below(&prefix)),
            above: Some(Arc::clone(leaf)).filter(|_| has_above(&prefix)),
            slots: [0; 256],
            children: vec![Child::Leaf(Arc::clone(leaf))],
            prefix,
        }
    }

    /// A node that owns what `inner` does, with the first `prefix_len` bytes of its prefix only:
    /// if that is not all of it, what is left goes into a node below.
    fn open_at(inner: &Inner<L>, prefix_len: usize) -> Draft<L> {
        let whole = Draft {
            prefix: inner.prefix.to_vec(),
            slots: inner.slots.map(u16::from),
            children: inner.children.to_vec(),
            below: inner.below.clone(),
            above: inner.above.clone(),
        };
        let (prefix, rest) = inner.prefix.split_at(prefix_len);
        let Some((&value, rest)) = rest.split_first() else {
            return whole;
        };
        let lower_half = Child::Inner(Arc::new(Inner {
            prefix: rest.into(),
            slots: inner.slots,
            children: inner.children.clone(),
            below: whole.below.clone().filter(|_| has_below(rest)),
            above: whole.above.clone().filter(|_| has_above(rest)),
        }));
        Draft::around(prefix.to_vec(), value, lower_half, whole.below, whole.above)
    }

    /// A node that leads to `child` at `value`, to `below` before it and to `above` after it.
    fn around(
        prefix: Vec<u8>,
        value: u8,
        child: Child<L>,
        below: Option<Arc<L>>,
        above: Option<Arc<L>>,
    ) -> Draft<L> {
        let mut children = vec![child];
        let mut slots = [0; 256];
        let (before, from_value) = slots.split_at_mut(usize::from(value));
        for (side, leaf) in [(before, &below), (&mut from_value[1..], &above)] {
            // Without keys on this side there are no values on this side either.
            if let Some(leaf) = leaf {
                side.fill(children.len() as u16);
                children.push(Child::Leaf(Arc::clone(leaf)));
            }
        }
        Draft {
            below: below.filter(|_| has_below(&prefix)),
            above: above.filter(|_| has_above(&prefix)),
            slots,
            children,
            prefix,
        }
    }

    fn child(&self, value: u8) -> &Child<L> {
        &self.children[usize::from(self.slots[usize::from(value)])]
    }

    fn set(&mut self, value: u8, child: Child<L>) {
        self.slots[usize::from(value)] = self.children.len() as u16;
        self.children.push(child);
    }

    /// The smallest child for what this node says.
    fn seal(mut self) -> Child<L> {
        loop {
            let (slots, children) = self.runs();
            if let [Child::Leaf(leaf)] = &*children {
                // One leaf owns the whole prefix: the place to branch is further up, if any.
                let owns =
                    |side: &Option<Arc<L>>| side.as_ref().is_none_or(|s| Arc::ptr_eq(s, leaf));
                if owns(&self.below) && owns(&self.above) {
                    return Child::Leaf(Arc::clone(leaf));
                }
                let value = self
                    .prefix
                    .pop()
                    .expect("what is beside an empty prefix is nothing");
                let child = Child::Leaf(Arc::clone(leaf));
                self = Draft::around(self.prefix, value, child, self.below, self.above);
                continue;
            }
            if let Some(merged) = self.merged(&slots, &children) {
                return Child::Inner(Arc::new(merged));
            }
            return Child::Inner(Arc::new(Inner {
                prefix: self.prefix.into(),
                slots,
                children: children.into(),
                below: self.below,
                above: self.above,
            }));
        }
    }

    /// The slots numbered by runs of the same child, and the children of those runs.
    fn runs(&self) -> ([u8; 256], Vec<Child<L>>) {
        let mut slots = [0; 256];
        let mut children: Vec<Child<L>> = Vec::new();
        let mut last_index = None;
        for (index, slot) in self.slots.iter().zip(&mut slots) {
            if last_index != Some(index) {
                let child = &self.children[usize::from(*index)];
                if !children.last().is_some_and(|last| last.is_same_leaf(child)) {
                    children.push(child.clone());
                }
                last_index = Some(index);
            }
            *slot = (children.len() - 1) as u8; // at most one run a value, so at most 256
        }
        (slots, children)
    }

    /// This node and the only node below it as one, if one leaf owns all before the latter's
    /// prefix and one all behind it.
    fn merged(&self, slots: &[u8; 256], children: &[Child<L>]) -> Option<Inner<L>> {
        let (inner, before, after) = match children {
            [Child::Inner(inner)] => (inner, None, None),
            [Child::Inner(inner), Child::Leaf(after)] => (inner, None, Some(after)),
            [Child::Leaf(before), Child::Inner(inner)] => (inner, Some(before), None),
            [Child::Leaf(before), Child::Inner(inner), Child::Leaf(after)] => {
                (inner, Some(before), Some(after))
            }
            _ => return None,
        };
        let value = slots
            .iter()
            .position(|&slot| slot == u8::from(before.is_some()))? as u8;
        Some(Inner {
            below: common_owner([self.below.as_ref(), before, inner.below.as_ref()])?,
            above: common_owner([self.above.as_ref(), after, inner.above.as_ref()])?,
            prefix: [&self.prefix, &[value][..], &inner.prefix].concat().into(),
            slots: inner.slots,
            children: inner.children.clone(),
        })
    }
}

/// The one leaf among `owners`, `Some(None)` if there is none, `None` if there are several.
fn common_owner<L>(owners: [Option<&Arc<L>>; 3]) -> Option<Option<Arc<L>>> {
    let mut owners = owners.into_iter().flatten();
    let Some(first) = owners.next() else {
        return Some(None);
    };
    owners
        .all(|owner| Arc::ptr_eq(owner, first))
        .then(|| Some(Arc::clone(first)))
}

/// Whether any key sorts before all keys that start with `prefix`.
fn has_below(prefix: &[u8]) -> bool {
    prefix.iter().any(|&byte| byte != 0)
}

/// Whether any key sorts after all keys that start with `prefix`.
fn has_above(prefix: &[u8]) -> bool {
    prefix.iter().any(|&byte| byte != u8::MAX)
}

/// The first byte of `key` and the bytes behind it; a zero where the key has ended.
#[inline]
fn first_byte(key: &[u8]) -> (u8, &[u8]) {
    key.split_first()
        .map_or((0, &[][..]), |(&first, rest)| (first, rest))
}

/// How many bytes of `prefix` the key `key`, zeros behind its end, starts with.
fn shared_len(prefix: &[u8], key: &[u8]) -> usize {
    let padded = key.iter().copied().chain(std::iter::repeat(0));
    prefix
        .iter()
        .zip(padded)
        .take_while(|&(&a, b)| a == b)
        .count()
}

/// Where `key`, zeros behind its end, sorts relative to all keys that start with `prefix`.
fn compare_padded(key: &[u8], prefix: &[u8]) -> Ordering {
    let common_len = key.len().min(prefix.len());
    key[..common_len].cmp(&prefix[..common_len]).then_with(|| {
        if has_below(&prefix[common_len..]) {
            Ordering::Less
        } else {
            Ordering::Equal
        }
    })
}

/// Iterator over the leaves of a tree in key order; see [`Tree::leaves`].
pub(crate) struct Leaves<'a, L> {
    pending: Vec<Step<'a, L>>,
    last: Option<&'a Arc<L>>,
}

enum Step<'a, L> {
    Leaf(&'a Arc<L>),
    Inner(&'a Inner<L>),
}

impl<'a, L> Step<'a, L> {
    fn of(child: &'a Child<L>) -> Self {
        match child {
            Child::Leaf(leaf) => Step::Leaf(leaf),
            Child::Inner(inner) => Step::Inner(inner),
        }
    }
}

impl<'a, L> Iterator for Leaves<'a, L> {
    type Item = &'a Arc<L>;

    fn next(&mut self) -> Option<&'a Arc<L>> {
        while let Some(step) = self.pending.pop() {
            match step {
                Step::Leaf(leaf) => {
                    if !self.last.is_some_and(|last| Arc::ptr_eq(last, leaf)) {
                        self.last = Some(leaf);
                        return Some(leaf);
                    }
                }
                Step::Inner(inner) => {
                    self.pending.extend(inner.above.as_ref().map(Step::Leaf));
                    self.pending
                        .extend(inner.children.iter().rev().map(Step::of));
                    self.pending.extend(inner.below.as_ref().map(Step::Leaf));
                }
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
