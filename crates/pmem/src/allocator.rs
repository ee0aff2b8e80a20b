//! Which units of an arena are free: the DRAM side of allocation, and its recovery from the table.
//!
//! # Generations
//!
//! The caller's records are valid only together with the generation of their run, so a generation
//! must never come back to a unit while old records with it may still lie there. A new run gets
//! one more than the greatest generation in the table words of all its units and than the
//! *floor* of the extent. Table words are not fenced by the allocator, so a crash may forget some;
//! two rules keep that harmless:
//!
//! 1. Generations are issued in blocks of [`GENERATION_LEASE`]. Before the first one of a block is
//!    used, the words that carry its predecessor are made durable. So at any moment no generation
//!    of an extent is more than one lease above the greatest durable one.
//! 2. On open the floor of each extent is raised a lease above everything found in its table, and
//!    made durable before anything is allocated. So whatever was issued and forgotten lies below.
//!
//! # Which words can contradict each other after a crash
//!
//! Freeing and allocating store one word per unit, flush it and leave the fence to the caller, so
//! a crash can bring back the head of a freed run whose units were given out again. The younger
//! run has the greater generation by construction, in its head and in all its words; so a head is
//! dead as soon as any word in its range, or any head reaching over it, has a greater generation.

use crate::pool_layout::{UnitState, UnitWord};

/// Generations that may be issued beyond the greatest durable one; see the module's comment.
pub(crate) const GENERATION_LEASE: u32 = 1024;

/// Where the next units are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// Single ones after the one handed out last, which spreads wear and generations over all free units; runs from the end.
    Rotate,
    /// As low as possible, so that few pages of plain DRAM are touched.
    Lowest,
}

/// One bit per unit.
#[derive(Debug)]
struct UnitSet {
    words: Vec<u64>,
}

impl UnitSet {
    fn new(units: u32, filled: bool) -> Self {
        let mut set = UnitSet {
            words: vec![0; units.div_ceil(64) as usize],
        };
        if filled {
            set.set_range(0, units, true);
        }
        set
    }

    fn contains(&self, unit: u32) -> bool {
        self.words[(unit / 64) as usize] & 1 << (unit % 64) != 0
    }

    fn set_range(&mut self, first: u32, units: u32, value: bool) {
        let end = first + units;
        let mut unit = first;
        while unit < end {
            let low = unit % 64;
            let count = (64 - low).min(end - unit);
            let mask = (u64::MAX >> (64 - count)) << low;
            let word = &mut self.words[(unit / 64) as usize];
            *word = if value { *word | mask } else { *word & !mask };
            unit += count;
        }
    }

    /// First member that is `from` or more.
    fn first_from(&self, from: u32) -> Option<u32> {
        let mut index = (from / 64) as usize;
        let mut word = *self.words.get(index)? & (u64::MAX << (from % 64));
        loop {
            if word != 0 {
                return Some(index as u32 * 64 + word.trailing_zeros());
            }
            index += 1;
            word = *self.words.get(index)?;
        }
    }

    /// First unit from `from` on that is no member, or `limit`.
    fn first_absent_from(&self, from: u32, limit: u32) -> u32 {
        let mut unit = from;
        while unit < limit {
            let absent = !self.words[(unit / 64) as usize] >> (unit % 64);
            if absent != 0 {
                return (unit + absent.trailing_zeros()).min(limit);
            }
            unit = (unit / 64 + 1) * 64;
        }
        limit
    }

    /// Maximal ranges of members, as first unit and length.
    fn ranges(&self, limit: u32) -> impl Iterator<Item = (u32, u32)> {
        let mut from = 0;
        std::iter::from_fn(move || {
            let first = self.first_from(from)?;
            let end = self.first_absent_from(first, limit);
            from = end;
            Some((first, end - first))
        })
    }
}

/// Units of one extent.
#[derive(Debug)]
pub(crate) struct ExtentUnits {
    /// First table word, as a pool offset.
    pub(crate) table_offset: u64,
    /// First unit, as a pool offset.
    pub(crate) data_offset: u64,
    pub(crate) unit_bytes: u32,
    pub(crate) unit_count: u32,
    /// Generations issued here are greater.
    pub(crate) floor: u32,
    free: UnitSet,
    /// Units handed out or faulted in since their memory was last given back.
    touched: UnitSet,
    free_units: u32,
    /// No free run is longer than this.
    longest_run_limit: u32,
}

impl ExtentUnits {
    /// An extent of free units.
    pub(crate) fn new(
        table_offset: u64,
        data_offset: u64,
        unit_bytes: u32,
        unit_count: u32,
        floor: u32,
    ) -> Self {
        ExtentUnits {
            table_offset,
            data_offset,
            unit_bytes,
            unit_count,
            floor,
            free: UnitSet::new(unit_count, true),
            touched: UnitSet::new(unit_count, false),
            free_units: unit_count,
            longest_run_limit: unit_count,
        }
    }

    pub(crate) fn unit_offset(&self, unit: u32) -> u64 {
        self.data_offset + u64::from(unit) * u64::from(self.unit_bytes)
    }

    pub(crate) fn word_offset(&self, unit: u32) -> u64 {
        self.table_offset + u64::from(unit) * 8
    }

    /// The unit that begins at pool offset `offset`.
    pub(crate) fn unit_at(&self, offset: u64) -> Option<u32> {
        let distance = offset.checked_sub(self.data_offset)?;
        let unit = distance / u64::from(self.unit_bytes);
        (distance.is_multiple_of(u64::from(self.unit_bytes)) && unit < u64::from(self.unit_count))
            .then_some(unit as u32)
    }

    pub(crate) fn is_free(&self, unit: u32) -> bool {
        self.free.contains(unit)
    }

    pub(crate) fn take(&mut self, first: u32, units: u32) {
        self.free.set_range(first, units, false);
        self.touched.set_range(first, units, true);
        self.free_units -= units;
    }

    pub(crate) fn give_back(&mut self, first: u32, units: u32) {
        self.free.set_range(first, units, true);
        self.free_units += units;
        self.longest_run_limit = self.unit_count;
    }

    pub(crate) fn free_units(&self) -> u32 {
        self.free_units
    }

    /// A free run: the first there is, or the last, so that long runs stay away from single units. One of a power of two begins at a multiple of its
    /// length in the pool, if there is room for that: whoever has many of one length may count in them.
    fn find_run(&mut self, units: u32, reuse: Reuse) -> Option<u32> {
        if units > self.free_units || units > self.longest_run_limit {
            return None;
        }
        let unit_bytes = u64::from(self.unit_bytes);
        let is_aligned = units.is_power_of_two() && self.data_offset.is_multiple_of(unit_bytes);
        // Units behind the last place that is aligned.
        let past_aligned = |unit: u32| match is_aligned {
            true => (self.unit_offset(unit) / unit_bytes % u64::from(units)) as u32,
            false => 0,
        };
        let (mut found, mut found_aligned) = (None, None);
        for (first, len) in self.free.ranges(self.unit_count) {
            let Some(room) = len.checked_sub(units) else {
                continue;
            };
            match reuse {
                Reuse::Lowest => {
                    let ahead = (units - past_aligned(first)) % units;
                    found = found.or(Some(first));
                    if ahead <= room {
                        found_aligned = Some(first + ahead);
                        break;
                    }
                }
                Reuse::Rotate => {
                    found = Some(first + room);
                    let aligned = room.checked_sub(past_aligned(first + room));
                    found_aligned = aligned.map(|room| first + room).or(found_aligned);
                }
            }
        }
        let found = found_aligned.or(found);
        if found.is_none() {
            self.longest_run_limit = units - 1;
        }
        found
    }

    /// Takes the next free range from a unit on whose memory was touched, for its memory to be given back; it counts as
    /// untouched when it comes back. It ends at the next multiple of `step_bytes` in the pool at the latest. First unit and number of units.
    pub(crate) fn take_unused(&mut self, from: u32, step_bytes: u64) -> Option<(u32, u32)> {
        let mut from = from;
        loop {
            let touched = self.touched.first_from(from)?;
            let first = self.free.first_from(touched)?;
            if first > touched {
                // In use up to there.
                from = first;
                continue;
            }
            let offset = self.unit_offset(first);
            let left_bytes = (offset + 1).next_multiple_of(step_bytes) - offset;
            let units_max = (left_bytes / u64::from(self.unit_bytes)).max(1);
            let limit = units_max
                .saturating_add(first.into())
                .min(self.unit_count.into()) as u32;
            let free_end = self.free.first_absent_from(first, limit);
            let end = self.touched.first_absent_from(first, free_end);
            self.take(first, end - first);
            self.touched.set_range(first, end - first, false);
            return Some((first, end - first));
        }
    }

    pub(crate) fn touched_units(&self) -> u64 {
        let words = self.touched.words.iter();
        words.map(|word| u64::from(word.count_ones())).sum()
    }

    /// Notes that the memory of a range of the pool, as far as it is of these units, was faulted in.
    pub(crate) fn touch(&mut self, start: u64, end: u64) {
        let unit_bytes = u64::from(self.unit_bytes);
        let unit_of = |offset: u64| {
            let unit = offset.saturating_sub(self.data_offset).div_ceil(unit_bytes);
            unit.min(u64::from(self.unit_count)) as u32
        };
        let (first, end) = (unit_of(start), unit_of(end));
        self.touched.set_range(first, end - first, true);
    }

    /// Units in use, ascending ranges.
    pub(crate) fn first_used_from(&self, from: u32) -> u32 {
        self.free.first_absent_from(from, self.unit_count)
    }
}

/// All extents of one arena.
#[derive(Debug)]
pub(crate) struct ArenaState {
    pub(crate) extents: Vec<ExtentUnits>,
    pub(crate) reuse: Reuse,
    /// Size of a unit, in bytes; 0 if the arena is not used.
    pub(crate) unit_bytes: u32,
    /// Where the search for a single unit goes on.
    cursor: (usize, u32),
    /// Units taken out of use because their generations ran out.
    pub(crate) retired_units: u64,
}

impl ArenaState {
    pub(crate) fn new(unit_bytes: u32, reuse: Reuse) -> Self {
        ArenaState {
            extents: Vec::new(),
            reuse,
            unit_bytes,
            cursor: (0, 0),
            retired_units: 0,
        }
    }

    pub(crate) fn free_units(&self) -> u64 {
        self.extents
            .iter()
            .map(|extent| u64::from(extent.free_units()))
            .sum()
    }

    pub(crate) fn total_units(&self) -> u64 {
        self.extents
            .iter()
            .map(|extent| u64::from(extent.unit_count))
            .sum()
    }

    /// Pool offset behind the units that are in use once so many more are, if the lowest are taken first.
    pub(crate) fn end_of_lowest(&self, units: u64) -> u64 {
        let mut left = self.total_units() - self.free_units() + units;
        let mut end = 0;
        for extent in &self.extents {
            let count = left.min(u64::from(extent.unit_count));
            if count > 0 {
                end = extent.data_offset + count * u64::from(extent.unit_bytes);
            }
            left -= count;
        }
        end
    }

    /// Finds `units` free units in a row and takes them: index of the extent, first unit.
    pub(crate) fn take(&mut self, units: u32) -> Option<(usize, u32)> {
        let (extent, unit) = if units == 1 {
            self.find_single()?
        } else {
            let reuse = self.reuse;
            let mut extents = self.extents.iter_mut().enumerate();
            let find = |(index, extent): (usize, &mut ExtentUnits)| {
                Some((index, extent.find_run(units, reuse)?))
            };
            match reuse {
                Reuse::Lowest => extents.find_map(find)?,
                Reuse::Rotate => extents.rev().find_map(find)?,
            }
        };
        self.extents[extent].take(unit, units);
        Some((extent, unit))
    }

    fn find_single(&mut self) -> Option<(usize, u32)> {
        let count = self.extents.len();
        let (start, from) = match self.reuse {
            Reuse::Rotate => self.cursor,
            Reuse::Lowest => (0, 0),
        };
        // One step more than there are extents: the first one is searched from its middle, then,
        // at last, from its beginning.
        for step in 0..=count {
            let index = (start + step) % count.max(1);
            let extent = self.extents.get(index)?;
            if extent.free_units == 0 {
                continue;
            }
            let from = if step == 0 { from } else { 0 };
            if let Some(unit) = extent.free.first_from(from) {
                self.cursor = (index, unit + 1);
                return Some((index, unit));
            }
        }
        None
    }

    /// The extent and unit of a run that begins at pool offset `offset`.
    pub(crate) fn locate(&self, offset: u64) -> Option<(usize, u32)> {
        let after = self
            .extents
            .partition_point(|extent| extent.data_offset <= offset);
        let index = after.checked_sub(1)?;
        Some((index, self.extents[index].unit_at(offset)?))
    }
}

/// What the allocation table of an extent says after its contradictions are resolved.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RecoveredTable {
    /// Live runs: first unit and length.
    pub(crate) live: Vec<(u32, u32)>,
    /// Heads of runs that were freed before the crash.
    pub(crate) dead: Vec<u32>,
    pub(crate) greatest_generation: u32,
}

/// Reads a table of `unit_count` words. An error names the unit and what is wrong with its word.
///
/// Linear in the size of the table, a bounded factor more if it is full of contradictions.
pub(crate) fn recover_table(
    unit_count: u32,
    word_at: impl Fn(u32) -> u64,
) -> Result<RecoveredTable, (u32, String)> {
    let decode = |unit: u32| UnitWord::decode(word_at(unit)).map_err(|why| (unit, why.to_owned()));
    let mut table = RecoveredTable::default();
    // Ends and generations of dead heads: they too prove that what they cover was freed.
    let mut shadows: Vec<(u32, u32)> = Vec::new();
    // Crashes leave few contradictions; a table made to waste time is refused.
    let mut work_left = 64 * u64::from(unit_count) + (1 << 20);
    let mut unit = 0;
    while unit < unit_count {
        let word = decode(unit)?;
        table.greatest_generation = table.greatest_generation.max(word.generation);
        let UnitState::Head { units, .. } = word.state else {
            unit += 1;
            continue;
        };
        if units > unit_count - unit {
            return Err((
                unit,
                format!("run of {units} units reaches beyond its extent"),
            ));
        }
        shadows.retain(|(end, _)| *end > unit);
        work_left = work_left
            .checked_sub(u64::from(units) + shadows.len() as u64)
            .ok_or_else(|| {
                (
                    unit,
                    "more overlapping runs than crashes can cause".to_owned(),
                )
            })?;
        let dead_before = table.dead.len();
        let mut dead = shadows
            .iter()
            .any(|(_, generation)| *generation > word.generation);
        for inner in unit + 1..unit + units {
            let inside = decode(inner)?;
            table.greatest_generation = table.greatest_generation.max(inside.generation);
            if inside.generation > word.generation {
                dead = true;
                break;
            }
            if let UnitState::Head {
                units: inner_units, ..
            } = inside.state
            {
                if inside.generation == word.generation {
                    return Err((inner, "two runs of one generation overlap".to_owned()));
                }
                table.dead.push(inner);
                shadows.push((inner.saturating_add(inner_units), inside.generation));
            }
        }
        if dead {
            // Heads inside were noted only on the assumption that this one lives; they are judged
            // again on their own.
            table.dead.truncate(dead_before);
            table.dead.push(unit);
            shadows.push((unit + units, word.generation));
            unit += 1;
        } else {
            table.live.push((unit, units));
            unit += units;
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(units: u32, generation: u32) -> u64 {
        UnitWord {
            state: UnitState::Head { units, kind: 0 },
            generation,
        }
        .encode()
    }

    fn inner(generation: u32) -> u64 {
        UnitWord {
            state: UnitState::Continuation,
            generation,
        }
        .encode()
    }

    fn free(generation: u32) -> u64 {
        UnitWord {
            state: UnitState::Free,
            generation,
        }
        .encode()
    }

    fn recover(words: &[u64]) -> Result<RecoveredTable, (u32, String)> {
        recover_table(words.len() as u32, |unit| words[unit as usize])
    }

    #[test]
    fn plain_tables() {
        let table = recover(&[0, head(2, 3), inner(3), free(9), head(1, 1)]).unwrap();
        assert_eq!(table.live, [(1, 2), (4, 1)]);
        assert!(table.dead.is_empty());
        assert_eq!(table.greatest_generation, 9);
    }

    #[test]
    fn younger_run_wins_wherever_it_overlaps() {
        // The older run lost its middle to a younger one.
        let table = recover(&[head(4, 4), head(1, 5), inner(4), inner(4)]).unwrap();
        assert_eq!((table.live, table.dead), (vec![(1, 1)], vec![0]));
        // The older head lies inside of a younger run whose continuation words were lost.
        let table = recover(&[head(4, 6), 0, head(2, 5), inner(5)]).unwrap();
        assert_eq!((table.live, table.dead), (vec![(0, 4)], vec![2]));
        // The younger run is freed already; its free word still outdates the older run.
        let table = recover(&[head(4, 4), free(5), inner(4), inner(4)]).unwrap();
        assert_eq!((table.live, table.dead), (vec![], vec![0]));
        // Three lives: the middle one is dead, and proves that the oldest is dead too.
        let table = recover(&[head(3, 6), free(7), head(3, 4), inner(4), inner(4)]).unwrap();
        assert_eq!((table.live, table.dead), (vec![], vec![0, 2]));
    }

    #[test]
    fn impossible_tables_are_refused() {
        assert_eq!(recover(&[0, head(3, 1)]).unwrap_err().0, 1);
        assert_eq!(recover(&[head(2, 1), head(1, 1)]).unwrap_err().0, 1);
        assert_eq!(recover(&[0, 0, head(1, 1) ^ 1]).unwrap_err().0, 2);
    }

    #[test]
    fn a_table_made_to_waste_time_is_refused_quickly() {
        let count = 60_000u32;
        // Every head reaches over all that follow and dies only at the very last word.
        let word_at = |unit: u32| {
            if unit == count - 1 {
                head(1, u32::MAX)
            } else {
                head(count - unit, count - unit)
            }
        };
        assert!(
            recover_table(count, word_at)
                .unwrap_err()
                .1
                .contains("overlapping")
        );
    }

    #[test]
    fn unit_set_ranges_and_edges() {
        let mut set = UnitSet::new(200, true);
        set.set_range(10, 120, false);
        assert_eq!(set.ranges(200).collect::<Vec<_>>(), [(0, 10), (130, 70)]);
        assert_eq!(set.first_from(10), Some(130));
        set.set_range(63, 2, true);
        assert_eq!(
            set.ranges(200).collect::<Vec<_>>(),
            [(0, 10), (63, 2), (130, 70)]
        );
        set.set_range(0, 200, false);
        assert_eq!(
            (set.first_from(0), set.first_from(199), set.first_from(500)),
            (None, None, None)
        );
    }

    #[test]
    fn runs_of_a_power_of_two_begin_at_multiples_of_their_length_where_there_is_room() {
        let mut arena = ArenaState::new(64, Reuse::Lowest);
        // Unit 0 is number 129 of the pool's.
        let data_offset = 129 * 64;
        arena
            .extents
            .push(ExtentUnits::new(4096, data_offset, 64, 14, 0));
        assert_eq!(arena.take(4), Some((0, 3)));
        assert_eq!(arena.take(4), Some((0, 7)));
        // Units 0 to 2, and 11 to 13: of each only one begins at a multiple of two that leaves room.
        assert_eq!(arena.take(2), Some((0, 1)));
        assert_eq!(arena.take(1), Some((0, 0)));
        assert_eq!(arena.take(2), Some((0, 11)));
        // What is left is unit 13. One more in front of it, and there is room that is not aligned.
        arena.extents[0].give_back(12, 1);
        assert_eq!(arena.take(2), Some((0, 12)));
    }

    #[test]
    fn from_the_end_too_they_begin_at_multiples_of_their_length() {
        let mut arena = ArenaState::new(64, Reuse::Rotate);
        arena
            .extents
            .push(ExtentUnits::new(4096, 129 * 64, 64, 14, 0));
        assert_eq!(arena.take(4), Some((0, 7)));
        assert_eq!(arena.take(4), Some((0, 3)));
        assert_eq!(arena.take(2), Some((0, 11)));
        assert_eq!(arena.take(1), Some((0, 0)));
        assert_eq!(arena.take(2), Some((0, 1)));
        arena.extents[0].give_back(12, 1);
        assert_eq!(arena.take(2), Some((0, 12)));
    }

    #[test]
    fn where_the_lowest_are_used_runs_are_among_them() {
        let mut arena = ArenaState::new(64, Reuse::Lowest);
        let second_offset = 8192 + 10 * 64;
        for data_offset in [8192, second_offset] {
            arena
                .extents
                .push(ExtentUnits::new(4096, data_offset, 64, 10, 0));
        }
        assert_eq!(arena.take(3), Some((0, 0)));
        assert_eq!(arena.take(1), Some((0, 3)));
        assert_eq!(arena.take(5), Some((0, 4)));
        assert_eq!(arena.take(3), Some((1, 0)));
        arena.extents[0].give_back(0, 3);
        assert_eq!(arena.take(3), Some((0, 0)));
    }

    #[test]
    fn single_units_rotate_and_long_runs_come_from_the_end() {
        let mut arena = ArenaState::new(64, Reuse::Rotate);
        arena.extents.push(ExtentUnits::new(4096, 8192, 64, 10, 0));
        assert_eq!(arena.take(1), Some((0, 0)));
        arena.extents[0].give_back(0, 1);
        assert_eq!(arena.take(1), Some((0, 1)));
        assert_eq!(arena.take(3), Some((0, 7)));
        assert_eq!(arena.take(6), None);
        assert_eq!(arena.take(5), Some((0, 2)));
        assert_eq!(arena.take(1), Some((0, 0)));
        assert_eq!(arena.take(1), None);
    }
}
