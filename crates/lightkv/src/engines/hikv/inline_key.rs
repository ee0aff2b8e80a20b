//! A key on its way through memory.

use smallvec::SmallVec;

/// Up to 36 bytes, the text of a UUID, need no allocation. What one thread allocates and another one frees makes both
/// wait for the allocator's locks, which cost a stream of puts a third of its rate.
pub(crate) type InlineKey = SmallVec<[u8; 36]>;
