//! Which units of a chunk are free.

/// One bit for each unit.
#[derive(Debug)]
pub(crate) struct Units {
    /// Set: taken. Bits behind the last unit are set for ever.
    taken: Vec<u64>,
    count: u32,
    free: u32,
    /// No free run is longer than this.
    longest_limit: u32,
    /// Where the search begins.
    next: u32,
}

impl Units {
    /// So many free units, at least 1.
    pub(crate) fn new(count: u32) -> Self {
        let mut taken = vec![0; count.div_ceil(64) as usize];
        let rest = count % 64;
        if rest != 0
            && let Some(last) = taken.last_mut()
        {
            *last = u64::MAX << rest;
        }
        Self {
            taken,
            count,
            free: count,
            longest_limit: count,
            next: 0,
        }
    }

    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// A run longer than this is not there.
    pub(crate) fn longest_limit(&self) -> u32 {
        self.longest_limit
    }

    /// Takes a run of free units; the first of them, or `None` if there is no such run.
    pub(crate) fn take(&mut self, units: u32) -> Option<u32> {
        if units > self.longest_limit {
            return None;
        }
        // Behind what was taken last, where nothing was freed in the meantime for the longest time; then from
        // the start, beyond the place where the first search began, for a run that reaches over it.
        let found = self.find(self.next, self.count, units).or_else(|| {
            let end = self.next.saturating_add(units).min(self.count);
            self.find(0, end, units)
        });
        let Some(first) = found else {
            self.longest_limit = units - 1;
            return None;
        };
        self.set(first, units, true);
        self.free -= units;
        self.longest_limit = self.longest_limit.min(self.free);
        self.next = first + units;
        Some(first)
    }

    /// Frees a run that was taken.
    pub(crate) fn give_back(&mut self, first: u32, units: u32) {
        self.set(first, units, false);
        self.free += units;
        // The bound stays tight, so that nobody searches here in vain: the hole that came to be is measured.
        let before = self.free_before(first);
        let end = self.first_from(first + units, self.count, true);
        self.longest_limit = self.longest_limit.max(end - before);
    }

    /// The first run of free units in a range.
    fn find(&self, from: u32, end: u32, units: u32) -> Option<u32> {
        let mut at = from;
        loop {
            let first = self.first_from(at, end, false);
            if first >= end || end - first < units {
                return None;
            }
            let run_end = self.first_from(first, first + units, true);
            if run_end == first + units {
                return Some(first);
            }
            at = run_end;
        }
    }

    /// The first unit of a range that is taken, or is free; `end` if there is none.
    fn first_from(&self, from: u32, end: u32, taken: bool) -> u32 {
        let mut at = from;
        while at < end {
            let word = self.taken[(at / 64) as usize];
            let wanted = if taken { word } else { !word } & (u64::MAX << (at % 64));
            if wanted != 0 {
                return (at / 64 * 64 + wanted.trailing_zeros()).min(end);
            }
            at = (at / 64 + 1) * 64;
        }
        end
    }

    /// The first of the free units directly before a place; the place itself if there are none.
    fn free_before(&self, place: u32) -> u32 {
        let mut at = place;
        while at > 0 {
            let last = at - 1;
            let below = self.taken[(last / 64) as usize] & (u64::MAX >> (63 - last % 64));
            if below != 0 {
                return last / 64 * 64 + (64 - below.leading_zeros());
            }
            at = last / 64 * 64;
        }
        0
    }

    fn set(&mut self, first: u32, units: u32, taken: bool) {
        let (mut at, end) = (first, first + units);
        while at < end {
            let low = at % 64;
            let count = (64 - low).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << low;
            let word = &mut self.taken[(at / 64) as usize];
            debug_assert_eq!(*word & mask, if taken { 0 } else { mask }, "unit {at}");
            *word ^= mask;
            at += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes and frees at random beside a plain model.
    #[test]
    fn it_agrees_with_a_plain_list() {
        for count in [1, 63, 64, 65, 200, 1000] {
            let mut units = Units::new(count);
            let mut model = vec![false; count as usize];
            let mut runs: Vec<(u32, u32)> = Vec::new();
            let mut state = u64::from(count);
            let mut random = move |below: u32| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                ((state >> 33) % u64::from(below)) as u32
            };
            for _ in 0..20_000 {
                if random(2) == 0 && !runs.is_empty() {
                    let (first, len) = runs.swap_remove(random(runs.len() as u32) as usize);
                    units.give_back(first, len);
                    model[first as usize..(first + len) as usize].fill(false);
                } else {
                    let wanted = 1 + random(70.min(count));
                    let longest = model.split(|taken| *taken).map(<[bool]>::len).max();
                    let longest = longest.unwrap_or(0) as u32;
                    assert!(units.longest_limit() >= longest);
                    match units.take(wanted) {
                        Some(first) => {
                            let run = &mut model[first as usize..(first + wanted) as usize];
                            assert!(run.iter().all(|taken| !taken));
                            run.fill(true);
                            runs.push((first, wanted));
                        }
                        None => assert!(longest < wanted, "{wanted} units are there"),
                    }
                }
                let free = model.iter().filter(|taken| !**taken).count();
                assert_eq!(units.free() as usize, free);
            }
        }
    }

    #[test]
    fn a_full_search_is_not_repeated_in_vain() {
        let mut units = Units::new(100);
        let runs: Vec<u32> = (0..10).map(|_| units.take(10).unwrap()).collect();
        units.give_back(runs[3], 10);
        units.give_back(runs[5], 10);
        assert_eq!(units.longest_limit(), 10);
        assert_eq!(units.take(11), None);
        units.give_back(runs[4], 10);
        assert_eq!(units.longest_limit(), 30);
        assert_eq!(units.take(30), Some(30));
        assert_eq!(units.take(1), None);
    }
}
