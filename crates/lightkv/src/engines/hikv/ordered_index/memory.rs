//! The memory of nodes and of keys that are stored apart: the only unsafe code of the tree.
//!
//! INVARIANT: an inner node's value words, the root word and the addresses of apart keys, as far as
//! the version of what holds them validates, lead to memory that is allocated, whole, and not yet
//! retired. Writers keep it: they store an address after its target was written, under the lock,
//! and retire a target only after they replaced or removed its last address, still under the lock.
//! Whoever loads such a word under a guard and validates behind the load knows that the target was
//! not retired before the guard was there, so it stays until the guard is gone.
//!
//! A pointer to a node is one word: the address, a multiple of 64, and in its lower bits whether
//! the node is a leaf and how many cache lines it has. So one load tells all that an access needs.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::{NonNull, with_exposed_provenance, with_exposed_provenance_mut};

use super::node::{ApartKeys, LINES_MAX, Node, WORDS_PER_LINE};
use super::sync::{AtomicU64, Guard, Ordering};
use super::version_lock::{Locked, Restart, Version};

const LINE_BYTES: usize = 64;
const LEAF: u64 = 1 << 5;
const LINES_MASK: u64 = LEAF - 1;
const TAGS: u64 = LINE_BYTES as u64 - 1;

const _: () = assert!(LINES_MAX as u64 <= LINES_MASK + 1);

/// The address of a node with its tags; means something only as long as the node is not retired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pointer(u64);

impl Pointer {
    /// The pointer that a parent stores as this word.
    pub(super) fn of(word: u64) -> Pointer {
        Pointer(word)
    }

    /// What parents store.
    pub(super) fn word(self) -> u64 {
        self.0
    }

    fn is_leaf(self) -> bool {
        self.0 & LEAF != 0
    }

    fn words(self) -> usize {
        ((self.0 & LINES_MASK) as usize + 1) * WORDS_PER_LINE
    }

    fn layout(self) -> Layout {
        layout(self.words())
    }

    fn address(self) -> usize {
        (self.0 & !TAGS) as usize
    }
}

fn layout(words: usize) -> Layout {
    let layout = Layout::array::<AtomicU64>(words).and_then(|layout| layout.align_to(LINE_BYTES));
    layout.expect("nodes are small")
}

/// A key that is stored apart: its address fits a word.
type ApartKey = Box<[u8]>;

/// What the tree holds, in bytes. Retired memory no longer counts: the epochs free it soon.
#[derive(Debug, Default)]
pub(super) struct Memory {
    bytes: std::sync::atomic::AtomicU64,
}

impl Memory {
    /// Bytes of all nodes and of all keys stored apart.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(std::sync::atomic::Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        // A count for itself: it orders nothing, here and below.
        self.bytes
            .fetch_add(bytes as u64, std::sync::atomic::Ordering::Relaxed);
    }

    /// Counts what another memory held, and that one no more.
    pub(super) fn take_over(&self, other: &Memory) {
        let bytes = other.bytes.swap(0, std::sync::atomic::Ordering::Relaxed);
        self.add(bytes as usize);
    }

    fn subtract(&self, bytes: usize) {
        self.bytes
            .fetch_sub(bytes as u64, std::sync::atomic::Ordering::Relaxed);
    }

    /// A new node with these words, whole cache lines of them.
    pub(super) fn allocate(&self, words: &[u64], is_leaf: bool) -> Pointer {
        let lines = words.len() / WORDS_PER_LINE;
        assert!(words.len().is_multiple_of(WORDS_PER_LINE) && (1..=LINES_MAX).contains(&lines));
        let layout = layout(words.len());
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc(layout) }.cast::<AtomicU64>();
        let Some(memory) = NonNull::new(memory) else {
            handle_alloc_error(layout)
        };
        for (index, word) in words.iter().enumerate() {
            // SAFETY: within the allocation, which nobody else knows yet.
            unsafe { memory.add(index).write(AtomicU64::new(*word)) };
        }
        self.add(words.len() * 8);
        let tags = (lines - 1) as u64 | if is_leaf { LEAF } else { 0 };
        Pointer(memory.as_ptr().expose_provenance() as u64 | tags)
    }

    /// A copy of a key; for the word that leads to it.
    pub(super) fn store_apart(&self, key: &[u8]) -> u64 {
        self.add(apart_bytes(key));
        let key: Box<ApartKey> = Box::new(key.into());
        Box::into_raw(key).expose_provenance() as u64
    }

    /// Frees a node once nobody can be reading it. Its parent leads to it no more.
    ///
    /// That the lock is given up here, with the node obsolete, means that no node is retired twice.
    pub(super) fn retire(&self, node: Node<'_>, mut locked: Locked<'_>, guard: &Guard) {
        locked.mark_obsolete();
        drop(locked);
        let pointer = pointer_to(node);
        self.subtract(pointer.words() * 8);
        // SAFETY: by the invariant above, readers that come later find no way to the node, and
        // closures of deferred calls own all that they need.
        unsafe { guard.defer_unchecked(move || free(pointer)) };
    }

    /// Frees a key stored apart once nobody can be reading it. The entry with `address` was removed under a lock.
    pub(super) fn retire_apart(&self, address: u64, guard: &Guard) {
        // SAFETY: not retired before: the one entry that led to it was removed just now.
        let key: &ApartKey = unsafe { &*with_exposed_provenance(address as usize) };
        self.subtract(apart_bytes(key));
        // SAFETY: as in `retire`.
        unsafe { guard.defer_unchecked(move || free_apart(address)) };
    }

    /// Frees a node at once: it was never published, or the tree is being dropped.
    pub(super) fn free_unshared(&self, pointer: Pointer) {
        self.subtract(pointer.words() * 8);
        // SAFETY: nobody else can be reading it.
        unsafe { free(pointer) };
    }

    /// Frees a key at once, as [`Memory::free_unshared`].
    pub(super) fn free_apart_unshared(&self, address: u64) {
        // SAFETY: nobody else can be reading it.
        unsafe {
            let key: &ApartKey = &*with_exposed_provenance(address as usize);
            self.subtract(apart_bytes(key));
            free_apart(address);
        }
    }
}

fn apart_bytes(key: &[u8]) -> usize {
    size_of::<ApartKey>() + key.len()
}

/// # Safety
///
/// The node was allocated here, nobody can be reading it, and it is not freed again.
unsafe fn free(pointer: Pointer) {
    let memory = with_exposed_provenance_mut::<AtomicU64>(pointer.address());
    // SAFETY: see above; the layout follows from the tags, which are those of the allocation.
    unsafe {
        std::ptr::slice_from_raw_parts_mut(memory, pointer.words()).drop_in_place();
        dealloc(memory.cast(), pointer.layout());
    }
}

/// # Safety
///
/// As [`free`].
unsafe fn free_apart(address: u64) {
    let key = with_exposed_provenance_mut::<ApartKey>(address as usize);
    // SAFETY: see above.
    drop(unsafe { Box::from_raw(key) });
}

/// # Safety
///
/// `pointer` was loaded from a root or a parent whose version validated behind the load, under a
/// guard that lives at least for `'g`; or the caller has the tree for itself.
unsafe fn node_at<'g>(pointer: Pointer) -> Node<'g> {
    let memory = with_exposed_provenance::<AtomicU64>(pointer.address());
    // SAFETY: see above, and the invariant.
    let words = unsafe { std::slice::from_raw_parts(memory, pointer.words()) };
    Node::new(words, pointer.is_leaf())
}

fn pointer_to(node: Node<'_>) -> Pointer {
    let tags = (node.lines() - 1) as u64 | if node.is_leaf() { LEAF } else { 0 };
    Pointer(node.words().as_ptr().expose_provenance() as u64 | tags)
}

/// What holds the pointer to the root: a version and a word, changed under the version's lock.
#[derive(Debug)]
pub(super) struct Root {
    pub(super) version: AtomicU64,
    pointer: AtomicU64,
}

impl Root {
    pub(super) fn new(pointer: Pointer) -> Root {
        Root {
            version: AtomicU64::new(0),
            pointer: AtomicU64::new(pointer.0),
        }
    }

    /// The root node.
    #[inline]
    pub(super) fn node<'g>(&self, guard: &'g Guard) -> Result<(Node<'g>, Version), Restart> {
        let _ = guard;
        let version = super::version_lock::read(&self.version)?;
        let pointer = Pointer(self.pointer.load(Ordering::Relaxed));
        super::version_lock::validate(&self.version, version)?;
        // SAFETY: validated, and the guard is held.
        Ok((unsafe { node_at(pointer) }, version))
    }

    /// Lets the tree begin at another node. For the holder of the lock.
    pub(super) fn set(&self, pointer: Pointer) {
        self.pointer.store(pointer.0, Ordering::Relaxed);
    }

    /// The pointer, for whoever has the tree for itself.
    pub(super) fn pointer_unshared(&self) -> Pointer {
        Pointer(self.pointer.load(Ordering::Relaxed))
    }
}

/// Follows addresses in nodes under a guard.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access<'g> {
    pub(super) guard: &'g Guard,
}

impl<'g> Access<'g> {
    /// The child of an entry of an inner node that was read with `version`.
    #[inline]
    pub(super) fn child(
        self,
        node: Node<'g>,
        version: Version,
        shape: super::node::Shape,
        entry: usize,
    ) -> Result<Node<'g>, Restart> {
        let pointer = Pointer(node.value(shape, entry)?);
        node.validate(version)?;
        assert!(!node.is_leaf(), "leaves have no children");
        // SAFETY: validated, and the guard is held.
        let child = unsafe { node_at(pointer) };
        // A search needs some lines of the first half, and a level of inner nodes is more than a processor has near.
        processor::prefetch(&child.words()[..child.words().len() / 2]);
        Ok(child)
    }
}

impl<'g> Access<'g> {
    /// Asks for what [`Access::child`] has not asked for of a leaf: all of it is soon to be read.
    #[inline]
    pub(super) fn fetch_rest(self, leaf: Node<'g>) {
        let words = leaf.words();
        processor::prefetch(&words[words.len() / 2..]);
    }

    /// Asks for the line in which an insertion into a leaf stores its payload.
    #[inline]
    pub(super) fn fetch_insertion(self, leaf: Node<'g>) {
        if let Ok(shape) = leaf.shape() {
            let words = leaf.words();
            let end = words.len().saturating_sub(shape.heap_words);
            processor::prefetch(&words[end.saturating_sub(1)..end]);
        }
    }
}

impl<'g> ApartKeys<'g> for Access<'g> {
    fn apart_key(
        &self,
        node: Node<'g>,
        version: Version,
        entry: usize,
    ) -> Result<&'g [u8], Restart> {
        let address = node.apart_address(node.shape()?, entry)?;
        node.validate(version)?;
        let address = address.expect("the caller saw that it is stored apart");
        // SAFETY: validated, and the guard is held.
        let key: &'g ApartKey = unsafe { &*with_exposed_provenance(address as usize) };
        Ok(key)
    }
}

/// Frees all nodes and keys below `pointer`, which nobody else can reach.
pub(super) fn free_tree(memory: &Memory, pointer: Pointer) {
    // SAFETY: nobody else can reach it.
    let node = unsafe { node_at(pointer) };
    let whole = "nobody changes it";
    let shape = node.shape().expect(whole);
    for entry in 0..shape.count {
        if let Some(address) = node.apart_address(shape, entry).expect(whole) {
            memory.free_apart_unshared(address);
        }
        if !node.is_leaf() {
            free_tree(memory, Pointer(node.value(shape, entry).expect(whole)));
        }
    }
    memory.free_unshared(pointer);
}

/// What the compiler does not find by itself.
#[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
mod processor {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

    use super::super::node::WORDS_PER_LINE;
    use super::AtomicU64;

    /// Asks for the cache lines of `words`, some of which are soon to be read.
    #[inline]
    pub(super) fn prefetch(words: &[AtomicU64]) {
        for line in words.chunks(WORDS_PER_LINE) {
            // SAFETY: a prefetch is a hint that reads nothing and faults nowhere, and every x86-64
            // processor has the instruction.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri), not(loom))))]
mod processor {
    #[inline]
    pub(super) fn prefetch(_words: &[super::AtomicU64]) {}
}
