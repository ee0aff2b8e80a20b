//! Emulated persistent memory: DRAM whose state after a kill or a power loss a test can take.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::counters::thread_number;
use crate::error::{PmemError, Result};
use crate::map::Mapping;
use crate::options::Granularity;
use crate::persistence::{
    CrashChooser, DropAll, KeepAll, PersistenceModel, PoolImage, SeededChooser,
};
use crate::trace::{StoreKind, TraceEvent, TraceRecord};

/// The medium under an emulated pool: it outlives the pool, so that a test can drop the pool
/// without closing it and take what would be left. Clones are handles to the same medium.
///
/// Opening a pool on a backing whose pool was dropped continues it: that is a restarted process,
/// and unfenced stores are still unfenced. To restart after a power loss, open a
/// [`crash_image`](EmulatedBacking::crash_image).
#[derive(Clone)]
pub struct EmulatedBacking {
    shared: Arc<Mutex<State>>,
    tracked: bool,
}

/// Called before each fence; see [`EmulatedBacking::observe_fences`].
type FenceObserver = Arc<dyn Fn() + Send + Sync>;

struct State {
    contents: Contents,
    observer: Option<FenceObserver>,
    trace: Option<Vec<TraceRecord>>,
    /// A live pool works on this medium.
    attached: bool,
}

enum Contents {
    /// Every store goes through the model; costs a lock and some allocations a store.
    Tracked(Box<PersistenceModel>),
    /// Nothing is known beyond the bytes themselves.
    Untracked(UntrackedBytes),
}

struct UntrackedBytes {
    extents: Vec<u64>,
    /// Contents until the first pool attaches.
    initial: Arc<Vec<u8>>,
    mapping: Option<Arc<Mapping>>,
}

impl fmt::Debug for EmulatedBacking {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("EmulatedBacking")
            .field("tracked", &self.tracked)
            .finish()
    }
}

impl Default for EmulatedBacking {
    fn default() -> Self {
        Self::new()
    }
}

impl EmulatedBacking {
    /// An empty medium that knows what a power loss would keep.
    pub fn new() -> Self {
        Self::from_image(PoolImage::default())
    }

    /// An empty medium for measurements: no tracking, stores run at full speed, and only
    /// [`kill_image`](EmulatedBacking::kill_image) is available.
    pub fn untracked() -> Self {
        let bytes = UntrackedBytes {
            extents: Vec::new(),
            initial: Arc::default(),
            mapping: None,
        };
        Self::with_contents(Contents::Untracked(bytes), false)
    }

    /// A tracked medium on which `image` is durable.
    pub fn from_image(image: PoolImage) -> Self {
        let model = PersistenceModel::with_granularity(image, Granularity::CacheLine);
        Self::with_contents(Contents::Tracked(Box::new(model)), true)
    }

    /// A tracked medium in the state of a model, for example [`PersistenceModel::after_kill`].
    pub fn from_model(model: PersistenceModel) -> Self {
        Self::with_contents(Contents::Tracked(Box::new(model)), true)
    }

    /// An untracked medium that holds `image`: for a store that is opened, read and thrown away.
    pub fn untracked_from_image(image: PoolImage) -> Self {
        let bytes = UntrackedBytes {
            extents: image.extents,
            initial: Arc::new(image.bytes),
            mapping: None,
        };
        Self::with_contents(Contents::Untracked(bytes), false)
    }

    /// Has a function called before each fence takes effect: the moments at which most is undecided. It
    /// runs on the thread that fences, without locks of this medium, and may take images and models.
    /// `None` ends that.
    pub fn observe_fences(&self, observer: Option<Arc<dyn Fn() + Send + Sync>>) {
        self.shared.lock().observer = observer;
    }

    fn with_contents(contents: Contents, tracked: bool) -> Self {
        let state = State {
            contents,
            observer: None,
            trace: None,
            attached: false,
        };
        EmulatedBacking {
            shared: Arc::new(Mutex::new(state)),
            tracked,
        }
    }

    /// Whether no extent exists yet.
    pub fn is_empty(&self) -> bool {
        self.extents().is_empty()
    }

    /// A new medium with what a power loss at this moment leaves, chosen by `seed`.
    ///
    /// # Panics
    ///
    /// On an untracked medium.
    pub fn crash_image(&self, seed: u64) -> EmulatedBacking {
        self.crash_image_with(&mut SeededChooser::new(seed))
    }

    /// A new medium with what a power loss at this moment leaves, line by line as `chooser` says.
    ///
    /// # Panics
    ///
    /// On an untracked medium.
    pub fn crash_image_with(&self, chooser: &mut dyn CrashChooser) -> EmulatedBacking {
        EmulatedBacking::from_image(self.model_image(chooser))
    }

    /// A new medium with everything stored so far: what a killed process leaves. It is tracked if
    /// this one is.
    pub fn kill_image(&self) -> EmulatedBacking {
        let image = self.image();
        if self.tracked {
            return EmulatedBacking::from_image(image);
        }
        EmulatedBacking::untracked_from_image(image)
    }

    /// Everything stored so far.
    pub fn image(&self) -> PoolImage {
        let state = self.shared.lock();
        match &state.contents {
            Contents::Tracked(model) => model.crash_image(&mut KeepAll),
            Contents::Untracked(bytes) => bytes.image(),
        }
    }

    /// Everything stored so far, to be looked at in parts.
    pub(crate) fn stored(&self) -> StoredBytes {
        let state = self.shared.lock();
        match &state.contents {
            Contents::Tracked(model) => {
                StoredBytes::Image(Arc::new(model.crash_image(&mut KeepAll).bytes))
            }
            Contents::Untracked(bytes) => bytes.stored(),
        }
    }

    /// What is certain to survive a power loss at this moment.
    ///
    /// # Panics
    ///
    /// On an untracked medium.
    pub fn durable_image(&self) -> PoolImage {
        self.model_image(&mut DropAll)
    }

    /// A copy of the model, to enumerate crash images from.
    ///
    /// # Panics
    ///
    /// On an untracked medium.
    pub fn model(&self) -> PersistenceModel {
        match &self.shared.lock().contents {
            Contents::Tracked(model) => (**model).clone(),
            Contents::Untracked(_) => panic!("an untracked medium does not know what survives"),
        }
    }

    fn model_image(&self, chooser: &mut dyn CrashChooser) -> PoolImage {
        match &self.shared.lock().contents {
            Contents::Tracked(model) => model.crash_image(chooser),
            Contents::Untracked(_) => panic!("an untracked medium does not know what survives"),
        }
    }

    /// Takes the trace recorded so far; recording goes on with an empty one.
    pub fn take_trace(&self) -> Vec<TraceRecord> {
        self.shared
            .lock()
            .trace
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Appends a note to the trace, if one is recorded. A recorder of another medium can call this
    /// to put its own events in order with those of the pool.
    pub fn mark(&self, note: u64) {
        self.shared.lock().record(TraceEvent::Mark(note));
    }

    pub(crate) fn is_tracked(&self) -> bool {
        self.tracked
    }

    /// Sizes of the extents, in order.
    pub(crate) fn extents(&self) -> Vec<u64> {
        match &self.shared.lock().contents {
            Contents::Tracked(model) => model.extents().to_vec(),
            Contents::Untracked(bytes) => bytes.extents.clone(),
        }
    }

    /// Begins the life of a pool on this medium. It copies [`EmulatedBacking::image`] into its own
    /// mapping.
    pub(crate) fn attach(&self, granularity: Granularity, recording: bool) -> Result<()> {
        if recording && !self.tracked {
            return Err(PmemError::options("an untracked medium cannot record"));
        }
        let mut state = self.shared.lock();
        if state.attached {
            return Err(PmemError::options("the emulated medium is open already"));
        }
        state.attached = true;
        match (recording, &mut state.trace) {
            (true, trace @ None) => *trace = Some(Vec::new()),
            (true, Some(_)) => {}
            (false, trace) => *trace = None,
        }
        if let Contents::Tracked(model) = &mut state.contents {
            model.set_granularity(granularity);
        }
        Ok(())
    }

    /// Ends the life of the pool on this medium; the medium keeps what was stored.
    pub(crate) fn detach(&self) {
        self.shared.lock().attached = false;
    }

    /// From here on the bytes of an untracked medium are those of `mapping`.
    pub(crate) fn use_mapping(&self, mapping: &Arc<Mapping>) {
        if let Contents::Untracked(bytes) = &mut self.shared.lock().contents {
            bytes.initial = Arc::default();
            bytes.mapping = Some(Arc::clone(mapping));
        }
    }

    /// Forgets all extents from index `count` on: their creation was interrupted.
    pub(crate) fn keep_extents(&self, count: usize) {
        let mut state = self.shared.lock();
        match &mut state.contents {
            Contents::Tracked(model) => model.keep_extents(count),
            Contents::Untracked(bytes) => {
                let mut image = bytes.image();
                image.extents.truncate(count);
                image
                    .bytes
                    .truncate(image.extents.iter().sum::<u64>() as usize);
                *bytes = UntrackedBytes {
                    extents: image.extents,
                    initial: Arc::new(image.bytes),
                    mapping: None,
                };
            }
        }
    }

    pub(crate) fn add_extent(&self, offset: u64, len_bytes: u64) {
        let mut state = self.shared.lock();
        match &mut state.contents {
            Contents::Tracked(model) => model.add_extent(offset, len_bytes),
            Contents::Untracked(bytes) => bytes.extents.push(len_bytes),
        }
        state.record(TraceEvent::Extent { offset, len_bytes });
    }

    /// Performs a store (`execute`) and notes it, as one step.
    pub(crate) fn store(&self, offset: u64, bytes: &[u8], kind: StoreKind, execute: impl FnOnce()) {
        let mut state = self.shared.lock();
        execute();
        if let Contents::Tracked(model) = &mut state.contents {
            model.store(thread_number(), offset, bytes, kind);
        }
        if state.trace.is_some() {
            state.record(TraceEvent::Store {
                offset,
                bytes: bytes.to_vec(),
                kind,
            });
        }
    }

    pub(crate) fn flush(&self, offset: u64, len_bytes: u64) {
        let mut state = self.shared.lock();
        if let Contents::Tracked(model) = &mut state.contents {
            model.flush(thread_number(), offset, len_bytes);
        }
        state.record(TraceEvent::Flush {
            offset,
            len: len_bytes,
        });
    }

    pub(crate) fn fence(&self) {
        let observer = self.shared.lock().observer.clone();
        if let Some(observer) = observer {
            observer();
        }
        let mut state = self.shared.lock();
        if let Contents::Tracked(model) = &mut state.contents {
            model.fence(thread_number());
        }
        state.record(TraceEvent::Fence);
    }
}

impl State {
    fn record(&mut self, event: TraceEvent) {
        if let Some(trace) = &mut self.trace {
            trace.push(TraceRecord {
                thread: thread_number(),
                event,
            });
        }
    }
}

impl UntrackedBytes {
    fn stored(&self) -> StoredBytes {
        match &self.mapping {
            None => StoredBytes::Image(Arc::clone(&self.initial)),
            Some(mapping) => StoredBytes::Mapped(Arc::clone(mapping), self.len()),
        }
    }

    fn image(&self) -> PoolImage {
        PoolImage {
            bytes: self.stored().range(0..self.len()).into_owned(),
            extents: self.extents.clone(),
        }
    }

    fn len(&self) -> usize {
        self.extents.iter().sum::<u64>() as usize
    }
}

/// What is stored on a medium. No pool stores to it meanwhile.
pub(crate) enum StoredBytes {
    Image(Arc<Vec<u8>>),
    /// So many bytes of it.
    Mapped(Arc<Mapping>, usize),
}

impl StoredBytes {
    /// A part of it, copied only where it is mapped: a pool of many extents looks at one after the other.
    pub(crate) fn range(&self, range: Range<usize>) -> Cow<'_, [u8]> {
        match self {
            Self::Image(bytes) => Cow::Borrowed(&bytes[range]),
            Self::Mapped(mapping, len) => {
                assert!(range.end <= *len, "beyond the extents");
                let mut bytes = vec![0; range.len()];
                let source = mapping.base().wrapping_add(range.start);
                // SAFETY: extents are mapped from the base on, without gaps, before they are
                // announced by `add_extent`.
                unsafe { crate::store::copy_out(source, &mut bytes) };
                Cow::Owned(bytes)
            }
        }
    }
}
