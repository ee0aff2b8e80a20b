//! The tree against a `BTreeMap` of bounds, its shape, its memory, and trees of hostile depth.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use proptest::prelude::*;

use super::*;

/// What a tree means: each lower bound and the leaf that owns the keys from there to the next.
#[derive(Clone)]
struct Model(BTreeMap<Vec<u8>, u32>);

impl Model {
    fn route(&self, key: &[u8]) -> u32 {
        *self
            .0
            .range(..=normalize_bound(key).to_vec())
            .next_back()
            .expect("the first is empty")
            .1
    }

    fn assign(&mut self, lower: &[u8], upper: Option<&[u8]>, leaf: u32) {
        let lower = normalize_bound(lower).to_vec();
        let upper = upper.map(|upper| normalize_bound(upper).to_vec());
        if upper.as_ref().is_some_and(|upper| *upper <= lower) {
            return;
        }
        if let Some(upper) = upper.clone() {
            let behind = self.route(&upper);
            self.0.insert(upper, behind);
        }
        self.0.retain(|bound, _| {
            *bound < lower || upper.as_ref().is_some_and(|upper| upper <= bound)
        });
        self.0.insert(lower, leaf);
        // A bound between two ranges of one leaf is none.
        let mut last = None;
        self.0
            .retain(|_, &mut leaf| last.replace(leaf) != Some(leaf));
    }
}

/// The promises about the shape of a tree, for one of its nodes.
fn check_shape(inner: &Inner<u32>) {
    assert!(inner.children.len() > 1 || matches!(inner.children[0], Child::Inner(_)));
    assert!(
        inner
            .children
            .windows(2)
            .all(|pair| !pair[0].is_same_leaf(&pair[1]))
    );
    assert!(inner.slots.is_sorted() && inner.slots[0] == 0);
    assert_eq!(usize::from(inner.slots[255]) + 1, inner.children.len());
    assert_eq!(inner.below.is_some(), has_below(&inner.prefix));
    assert_eq!(inner.above.is_some(), has_above(&inner.prefix));
}

/// Short strings of few letters, so that they collide, and some with a long common prefix.
fn any_key() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        3 => Just(b'a'), 2 => Just(b'b'), 2 => Just(0), 2 => Just(255), 1 => Just(1),
        1 => Just(254), 1 => any::<u8>()
    ];
    let prefix = prop_oneof![
        6 => Just(vec![]), 2 => Just(b"user0000".to_vec()), 1 => Just(vec![0; 5]),
        1 => Just(vec![255; 5]), 1 => Just(vec![b'x'; 300])
    ];
    (prefix, prop::collection::vec(byte, 0..5)).prop_map(|(prefix, tail)| [prefix, tail].concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 400 }))]

    #[test]
    fn assigns_and_routes_agree_with_a_map_of_bounds(
        changes in prop::collection::vec((any_key(), prop::option::of(any_key()), 0_usize..12), 1..40),
        probes in prop::collection::vec(any_key(), 40),
    ) {
        // A dozen leaves, so that ranges of the same leaf meet, merge and collapse again.
        let leaves: Vec<_> = (0..12).map(Arc::new).collect();
        let mut tree = Tree::new(Arc::clone(&leaves[0]));
        let mut model = Model(BTreeMap::from([(vec![], 0)]));
        let mut history = Vec::new();
        for (lower, upper, leaf) in &changes {
            history.push((tree.clone(), model.clone()));
            tree = tree.assign(lower, upper.as_deref(), Arc::clone(&leaves[*leaf]));
            model.assign(lower, upper.as_deref(), *leaf as u32);

            let in_order: Vec<u32> = tree.leaves().map(|leaf| **leaf).collect();
            prop_assert_eq!(in_order, model.0.values().copied().collect::<Vec<_>>());
            tree.for_each_inner(|inner, _| check_shape(inner));
            // The empty bound of the first leaf needs no node.
            prop_assert!(tree.inner_nodes() <= 2 * (model.0.len() - 1), "{} nodes", tree.inner_nodes());
        }
        history.push((tree, model));
        // Old trees have not changed.
        for (tree, model) in &history {
            let bounds = model.0.keys().cloned();
            for key in bounds.chain(probes.iter().cloned()) {
                prop_assert_eq!(**tree.route(&key), model.route(&key), "{:?}", key);
                // The neighbours of the key: just before and just after it.
                let after = [&key, &[0, 0, 1][..]].concat();
                prop_assert_eq!(**tree.route(&after), model.route(&after), "{:?}", after);
                if let Some((last, front)) = normalize_bound(&key).split_last() {
                    let before = [front, &[last - 1, 255, 255, 255][..]].concat();
                    prop_assert_eq!(**tree.route(&before), model.route(&before), "{:?}", before);
                }
            }
        }
    }
}

#[test]
fn zeros_at_the_end_of_bounds_and_keys_do_not_count() {
    assert_eq!(normalize_bound(b"ab\0\0"), b"ab");
    assert_eq!(normalize_bound(b"\0a\0"), b"\0a");
    assert_eq!(normalize_bound(b"\0\0"), b"");
    let tree = Tree::from_sorted(vec![
        (vec![], Arc::new(1)),
        (b"ab\0\0".to_vec(), Arc::new(2)),
        (b"ab\0\x01".to_vec(), Arc::new(3)),
    ]);
    for (key, leaf) in [
        (&b"aa\xff"[..], 1),
        (b"ab", 2),
        (b"ab\0", 2),
        (b"ab\0\0\0\0", 2),
        (b"ab\0\0\x01", 2),
        (b"ab\0\x01", 3),
        (b"b", 3),
    ] {
        assert_eq!(**tree.route(key), leaf, "{key:?}");
    }
}

#[test]
fn a_common_prefix_costs_one_node() {
    let one = Tree::new(Arc::new(0));
    assert_eq!(
        (one.inner_nodes(), one.depth(), one.leaf_count()),
        (0, 0, 1)
    );
    let leaves: Vec<_> = (0..10).map(Arc::new).collect();
    let mut bounds = vec![(vec![], Arc::clone(&leaves[0]))];
    for (digit, leaf) in leaves.iter().enumerate().skip(1) {
        bounds.push((
            format!("user00000000{digit}").into_bytes(),
            Arc::clone(leaf),
        ));
    }
    let tree = Tree::from_sorted(bounds);
    assert_eq!(
        (tree.inner_nodes(), tree.depth(), tree.leaf_count()),
        (1, 1, 10)
    );
    assert!(
        (400..800).contains(&tree.memory_bytes()),
        "{}",
        tree.memory_bytes()
    );
    for (key, leaf) in [
        (&b""[..], 0),
        (b"user", 0),
        (b"user000000000999", 0),
        (b"user0000000010", 1),
        (b"user000000005", 5),
        (b"user00000001", 9),
        (b"v", 9),
    ] {
        assert_eq!(**tree.route(key), leaf, "{key:?}");
    }
    // Merging the leaves takes the node away again.
    let merged = tree.assign(b"user000000001", None, Arc::clone(&leaves[0]));
    assert_eq!((merged.inner_nodes(), merged.leaf_count()), (0, 1));
}

#[test]
fn a_change_shares_what_it_does_not_touch() {
    let bounds = (0..1_000).map(|n| (format!("{n:03}").into_bytes(), Arc::new(n)));
    let bounds = [(vec![], Arc::new(1_000))]
        .into_iter()
        .chain(bounds)
        .collect();
    let tree = Tree::from_sorted(bounds);
    assert_eq!((tree.inner_nodes(), tree.depth()), (111, 3));
    let nodes_of = |tree: &Tree<i32>| {
        let mut nodes = Vec::new();
        tree.for_each_inner(|inner, _| nodes.push(std::ptr::from_ref(inner)));
        nodes
    };
    let changed = tree.assign(b"5555", Some(b"556"), Arc::new(1_001));
    let old = nodes_of(&tree);
    let copied = nodes_of(&changed)
        .iter()
        .filter(|node| !old.contains(node))
        .count();
    assert_eq!(copied, 4, "the path of three, and a new node below it");
    assert_eq!(**changed.route(b"5555"), 1_001);
    assert_eq!(**tree.route(b"5555"), 555);
}

/// A leaf that counts itself.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(alive: &'a AtomicUsize) -> Arc<Self> {
        alive.fetch_add(1, Relaxed);
        Arc::new(Counted(alive))
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[test]
fn leaves_die_with_the_last_tree_that_knows_them() {
    let alive = AtomicUsize::new(0);
    let mut trees = vec![Tree::new(Counted::new(&alive))];
    for number in 0..300_u32 {
        let lower = (number.wrapping_mul(0x9e37_79b9)).to_be_bytes();
        let next = trees[trees.len() - 1].assign(&lower, None, Counted::new(&alive));
        trees.push(next);
    }
    let last = trees.pop().expect("there are trees");
    assert_eq!(alive.load(Relaxed), 301);
    drop(trees);
    assert_eq!(alive.load(Relaxed), last.leaf_count());
    let only = last.assign(b"", None, Counted::new(&alive));
    drop(last);
    assert_eq!(alive.load(Relaxed), 1);
    drop(only);
    assert_eq!(alive.load(Relaxed), 0);
}

#[test]
fn a_tree_may_be_as_deep_as_it_has_leaves() {
    let depth = if cfg!(miri) { 200 } else { 20_000 };
    let bound = |n: usize| vec![b'a'; n + 1];
    let mut tree = Tree::new(Arc::new(0));
    // From the long bounds to the short ones, so that each step costs one node.
    for n in (0..depth).rev() {
        tree = tree.assign(&bound(n), Some(&bound(n + 1)), Arc::new(n + 1));
    }
    assert_eq!(tree.depth(), depth);
    assert_eq!(**tree.route(&bound(depth - 1)), depth);
    let old = tree.clone();
    tree = tree.assign(&bound(depth - 1), Some(&bound(depth)), Arc::new(7));
    assert_eq!(**tree.route(&bound(depth - 1)), 7);
    assert_eq!(**old.route(&bound(depth - 1)), depth);
    assert_eq!(tree.leaves().count(), depth + 2);
    drop(old);
    tree = tree.assign(&bound(5), Some(&bound(depth)), Arc::new(8));
    assert!(tree.depth() < 10);
}

#[test]
fn a_prefix_may_be_as_long_as_a_key() {
    for byte in [0, b'a', 255] {
        let long = [vec![byte; 65_535], vec![b'b']].concat();
        let tree = Tree::new(Arc::new(0)).assign(&long, None, Arc::new(1));
        assert_eq!(tree.inner_nodes(), 1);
        assert_eq!((**tree.route(&long[..65_534]), **tree.route(&long)), (0, 1));
        let longer = tree.assign(&vec![byte; 65_000], Some(&long), Arc::new(2));
        assert!(longer.inner_nodes() <= 2);
        assert_eq!(**longer.route(&long), 1);
        assert_eq!(
            **longer.route(&vec![byte; 65_536]),
            if byte == 255 { 1 } else { 2 }
        );
    }
}
