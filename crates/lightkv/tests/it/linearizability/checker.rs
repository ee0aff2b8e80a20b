//! Whether calls can be put into an order: the search of Wing and Gong with Lowe's memory.
//!
//! A key is a register: a write sets it, a read must return what the last write before it set. Calls that
//! overlap in time may be in any order, others must be in theirs. The search takes one call after the
//! other, each time one that began before every call that is left ended, and remembers where it has
//! been: a set of calls and a state. Where calls have one key each, a history is linearizable if it is on each key
//! (Herlihy and Wing), so the sets stay small. Calls that write or read several keys at one moment need more: an order
//! of all of them that every key agrees with.
//!
//! A crash ends a history at a *cut*: what the next open finds is the state at some moment of the
//! order. Calls that had to survive lie before the cut, and every call that returned lies somewhere, for others
//! have seen what it did. A call that did not return may have happened or not, and so may one that returned while the crash was
//! under way. What began after its return is not in the order without it: a search that does not know this may take for ever
//! where many calls meet a crash.

use std::collections::HashSet;
use std::fmt::Debug;
use std::hash::Hash;

use super::KEYS;

/// What a register holds: the number of a write, or nothing.
pub(super) type Content = Option<u64>;

/// What a call did to something that has a state.
pub(super) trait Action {
    type State: Clone + Eq + Hash;

    /// The state after it; `None` if it cannot have answered so in this one.
    fn after(&self, state: &Self::State) -> Option<Self::State>;
}

/// What was done with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OfKey {
    Write(Content),
    Read(Content),
}

impl Action for OfKey {
    type State = Content;

    fn after(&self, content: &Content) -> Option<Content> {
        match *self {
            Self::Write(written) => Some(written),
            Self::Read(read) => (read == *content).then_some(read),
        }
    }
}

/// What was done with several keys at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OfStore {
    Write(Vec<(usize, Content)>),
    Read([Content; KEYS]),
}

impl Action for OfStore {
    type State = [Content; KEYS];

    fn after(&self, contents: &Self::State) -> Option<Self::State> {
        match self {
            Self::Write(written) => {
                let mut contents = *contents;
                for &(key, content) in written {
                    contents[key] = content;
                }
                Some(contents)
            }
            Self::Read(read) => (read == contents).then_some(*read),
        }
    }
}

/// A call, with the ticks of a clock that all threads share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call<A> {
    pub(super) action: A,
    pub(super) begin: u64,
    /// `None` if it did not return.
    pub(super) end: Option<u64>,
    /// Whether it has happened: it returned, and before any crash began.
    pub(super) is_certain: bool,
    /// Whether a crash must keep it.
    pub(super) is_durable: bool,
}

/// Most calls that are put into one order: they are the bits of a word.
const CALLS_MAX: usize = 128;

struct Search<'a, A: Action> {
    calls: &'a [Call<A>],
    /// Calls that have to be in the order, and those that have to be before the cut.
    certain: u128,
    durable: u128,
    /// What an open after the crash found.
    found: Option<A::State>,
    /// Sets of calls, states, and whether the cut was passed, that lead nowhere.
    visited: HashSet<(u128, A::State, bool)>,
}

/// Whether there is an order of the calls that begins in a state, and has a moment after all durable
/// calls at which the state is what was found after a crash, if there was one.
pub(super) fn is_linearizable<A: Action>(
    calls: &[Call<A>],
    initial: A::State,
    found: Option<A::State>,
) -> bool {
    assert!(calls.len() <= CALLS_MAX, "{} calls", calls.len());
    let bits = |is_in: fn(&Call<A>) -> bool| {
        calls
            .iter()
            .enumerate()
            .filter(|(_, call)| is_in(call))
            .fold(0, |set, (index, _)| set | 1_u128 << index)
    };
    let is_cut = found.is_none();
    let mut search = Search {
        calls,
        certain: bits(|call| call.is_certain),
        durable: bits(|call| call.is_durable),
        found,
        visited: HashSet::new(),
    };
    search.run(0, initial, is_cut)
}

impl<A: Action> Search<'_, A> {
    fn run(&mut self, done: u128, state: A::State, is_cut: bool) -> bool {
        let can_cut = done & self.durable == self.durable && self.found.as_ref() == Some(&state);
        let is_cut = is_cut || can_cut;
        if is_cut && done & self.certain == self.certain {
            return true;
        }
        if !self.visited.insert((done, state.clone(), is_cut)) {
            return false;
        }
        // Only what began before the first end among the others can be next.
        let left = |index: &usize| done & (1 << index) == 0;
        let first_end = (0..self.calls.len())
            .filter(left)
            .filter_map(|index| self.calls[index].end)
            .min();
        for index in (0..self.calls.len()).filter(left) {
            let call = &self.calls[index];
            if first_end.is_some_and(|end| call.begin > end) {
                continue;
            }
            let Some(next) = call.action.after(&state) else {
                continue;
            };
            if self.run(done | 1 << index, next, is_cut) {
                return true;
            }
        }
        false
    }
}

/// The calls as a table, for a message.
pub(super) fn table<A: Debug>(calls: &[Call<A>]) -> String {
    let mut calls: Vec<_> = calls.iter().collect();
    calls.sort_by_key(|call| call.begin);
    calls
        .iter()
        .map(|call| {
            let end = call.end.map_or("-".to_string(), |end| end.to_string());
            let fate = match (call.is_certain, call.is_durable) {
                (_, true) => ", durable",
                (true, false) => "",
                (false, false) => ", may be lost",
            };
            format!("  {} to {end}: {:?}{fate}\n", call.begin, call.action)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call<A>(action: A, begin: u64, end: u64) -> Call<A> {
        Call {
            action,
            begin,
            end: (end > 0).then_some(end),
            is_certain: end > 0,
            is_durable: false,
        }
    }

    fn write(number: u64, begin: u64, end: u64) -> Call<OfKey> {
        call(OfKey::Write(Some(number)), begin, end)
    }

    fn read(number: u64, begin: u64, end: u64) -> Call<OfKey> {
        let content = (number > 0).then_some(number);
        call(OfKey::Read(content), begin, end)
    }

    #[test]
    fn overlapping_calls_may_be_in_any_order() {
        let calls = [write(1, 1, 10), write(2, 2, 9), read(1, 11, 12)];
        assert!(is_linearizable(&calls, None, None));
        let calls = [write(1, 1, 10), write(2, 2, 9), read(2, 11, 12)];
        assert!(is_linearizable(&calls, None, None));
        let calls = [write(1, 1, 10), read(0, 2, 3), read(1, 4, 5)];
        assert!(is_linearizable(&calls, None, None));
    }

    #[test]
    fn stale_and_foreign_and_reversed_reads_are_refused() {
        let stale = [write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)];
        assert!(!is_linearizable(&stale, None, None));
        let foreign = [write(1, 1, 2), read(3, 3, 4)];
        assert!(!is_linearizable(&foreign, None, None));
        let lost = [write(1, 1, 2), read(0, 3, 4)];
        assert!(!is_linearizable(&lost, None, None));
        // One reader sees the new value, a later one the old one again.
        let reversed = [write(1, 1, 10), read(1, 2, 3), read(0, 4, 5)];
        assert!(!is_linearizable(&reversed, None, None));
        // Two readers that do not agree on the order of two writes.
        let split = [
            write(1, 1, 10),
            write(2, 1, 10),
            read(1, 11, 12),
            read(2, 13, 14),
        ];
        assert!(!is_linearizable(&split, None, None));
    }

    #[test]
    fn a_call_that_did_not_return_happened_or_not() {
        let pending = write(2, 3, 0);
        for seen in [1, 2] {
            assert!(is_linearizable(
                &[write(1, 1, 2), pending, read(seen, 4, 5)],
                None,
                None
            ));
        }
        // But not before it began, and not any more after it was seen not to have.
        assert!(!is_linearizable(&[read(2, 1, 2), pending], None, None));
        let wavering = [write(1, 1, 2), pending, read(2, 4, 5), read(1, 6, 7)];
        assert!(!is_linearizable(&wavering, None, None));
    }

    #[test]
    fn a_crash_keeps_what_is_durable_and_a_prefix_of_the_rest() {
        let mut calls = [write(1, 1, 2), write(2, 3, 4), write(3, 5, 6)];
        for found in [None, Some(1), Some(2), Some(3)] {
            assert!(is_linearizable(&calls, None, Some(found)));
        }
        calls[1].is_durable = true;
        for (found, is_right) in [(0, false), (1, false), (2, true), (3, true), (4, false)] {
            let found = (found > 0).then_some(found);
            assert_eq!(is_linearizable(&calls, None, Some(found)), is_right);
        }
        // What a read has seen cannot be undone by an order of its own.
        let seen = [write(1, 1, 9), write(2, 1, 9), read(2, 10, 11)];
        assert!(is_linearizable(&seen, None, Some(Some(1))));
        let mut durable = seen;
        durable[1].is_durable = true;
        assert!(!is_linearizable(&durable, None, Some(Some(1))));
    }

    #[test]
    fn of_two_calls_beside_a_crash_the_later_is_not_there_alone() {
        let beside = |key, begin, end| Call {
            is_certain: false,
            ..call(OfStore::Write(vec![(key, Some(1))]), begin, end)
        };
        let state = |contents: [u64; 2]| -> [Content; KEYS] {
            std::array::from_fn(|key| contents.get(key).copied().filter(|number| *number > 0))
        };
        let in_turn = [beside(0, 1, 2), beside(1, 3, 4)];
        for (found, is_right) in [
            ([0, 0], true),
            ([1, 0], true),
            ([1, 1], true),
            ([0, 1], false),
        ] {
            let is_found = |calls: &[_]| is_linearizable(calls, state([0, 0]), Some(state(found)));
            assert_eq!(is_found(&in_turn), is_right);
            assert!(is_found(&[beside(0, 1, 3), beside(1, 2, 4)]));
        }
    }

    #[test]
    fn what_is_written_at_one_moment_is_seen_at_one() {
        let written = |keys: std::ops::Range<usize>, content| {
            OfStore::Write(keys.map(|key| (key, content)).collect())
        };
        let read = |first, rest| {
            let mut contents = [rest; KEYS];
            contents[0] = first;
            OfStore::Read(contents)
        };
        let (none, one) = ([None; KEYS], Some(1));
        let filled = call(written(0..KEYS, one), 1, 2);
        // A deletion of all keys, while others read them.
        let deleted = call(written(0..KEYS, None), 3, 10);
        for (first, rest, is_right) in [
            (one, one, true),
            (None, None, true),
            (None, one, false),
            (one, None, false),
        ] {
            let seen = call(read(first, rest), 4, 5);
            let calls = [filled.clone(), deleted.clone(), seen];
            assert_eq!(is_linearizable(&calls, none, None), is_right);
        }
        // Each key by itself would allow this: two readers see two deletions in two orders.
        let halves = [
            call(written(0..1, None), 3, 10),
            call(written(1..KEYS, None), 3, 10),
        ];
        for (other, is_right) in [(read(None, one), true), (read(one, None), false)] {
            let mut calls = vec![filled.clone(), halves[0].clone(), halves[1].clone()];
            calls.extend([
                call(read(None, one), 4, 9),
                call(other, 4, 9),
                call(read(None, None), 11, 12),
            ]);
            assert_eq!(is_linearizable(&calls, none, None), is_right);
        }
        // A crash finds all of it or nothing, and all of it once it is durable.
        let state = |first, rest| match read(first, rest) {
            OfStore::Read(contents) => contents,
            OfStore::Write(_) => unreachable!("it is a read"),
        };
        let mut calls = [filled, deleted];
        calls[0].is_durable = true;
        let is_right =
            |calls: &[_], first, rest| is_linearizable(calls, none, Some(state(first, rest)));
        assert!(is_right(&calls, one, one) && is_right(&calls, None, None));
        assert!(!is_right(&calls, one, None) && !is_right(&calls, None, one));
        calls[1].is_durable = true;
        assert!(is_right(&calls, None, None) && !is_right(&calls, one, one));
    }
}
