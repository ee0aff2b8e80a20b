//! Random sequences of operations over awkward keys.

use std::ops::Bound;

use super::operation::{Bounds, Operation, TestKey, TestValue, Walk};
use super::random::Random;

/// Slots for snapshots, and as many for held scans.
pub(super) const SLOTS: usize = 3;

/// A family of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeySpace {
    /// 16-digit decimals.
    Decimal { count: u64 },
    /// Zero to four bytes, many of them zeros: where padded slices are ambiguous.
    Zeros,
    /// More than 100 equal bytes, then a number.
    LongPrefix { count: u64 },
    /// Random bytes.
    Binary,
    /// Ever larger numbers.
    Monotone,
    /// The same key over and over.
    Hot,
    /// The longest key allowed.
    Longest,
}

/// Frequencies of the rarer operations: one in so many.
#[derive(Debug)]
struct Rates {
    read: u64,
    delete: u64,
    delete_range: u64,
    batch: u64,
    snapshot: u64,
    maintenance: u64,
    reopen: u64,
    sync: u64,
}

struct Generator {
    random: Random,
    spaces: Vec<KeySpace>,
    next_monotone: u64,
    next_value: u64,
    large_values: bool,
}

/// The operations of the sequence with that seed.
pub(super) fn operations(seed: u64) -> Vec<Operation> {
    let mut random = Random::new(seed);
    let count = match random.below(4) {
        0 => random.within(10..60),
        1 | 2 => random.within(60..400),
        _ => random.within(400..900),
    };
    let all = [
        KeySpace::Decimal {
            count: random.within(3..500),
        },
        KeySpace::Zeros,
        KeySpace::LongPrefix {
            count: random.within(3..300),
        },
        KeySpace::Binary,
        KeySpace::Monotone,
        KeySpace::Hot,
        KeySpace::Longest,
    ];
    // The longest key crowds everything else out of a tiny buffer, so it is rare.
    let spaces = (0..random.within(1..4))
        .map(|_| {
            if random.once_in(30) {
                all[6]
            } else {
                all[random.below(6)]
            }
        })
        .collect();
    let rates = Rates {
        read: *random.choose(&[3, 6]),
        delete: *random.choose(&[3, 6, 20]),
        delete_range: *random.choose(&[15, 50, 400]),
        batch: *random.choose(&[4, 10, 30]),
        snapshot: *random.choose(&[8, 20, 200]),
        maintenance: *random.choose(&[15, 40, 150]),
        reopen: *random.choose(&[20, 60, 150]),
        sync: *random.choose(&[5, 30, 300]),
    };
    let large_values = random.once_in(3);
    let mut generator = Generator {
        random,
        spaces,
        next_monotone: 0,
        next_value: 0,
        large_values,
    };
    (0..count).map(|_| generator.operation(&rates)).collect()
}

impl Generator {
    fn operation(&mut self, rates: &Rates) -> Operation {
        if self.random.once_in(rates.reopen) {
            return self.reopen();
        }
        if self.random.once_in(rates.maintenance) {
            return self.maintenance();
        }
        if self.random.once_in(rates.snapshot) {
            return self.held();
        }
        if self.random.once_in(rates.read) {
            return self.read();
        }
        let sync = self.random.once_in(rates.sync);
        if self.random.once_in(rates.batch) {
            let writes = (0..self.random.within(2..41))
                .map(|_| {
                    let value = (!self.random.once_in(rates.delete)).then(|| self.value());
                    (self.key(), value)
                })
                .collect();
            return Operation::Batch { writes, sync };
        }
        if self.random.once_in(rates.delete_range) {
            return self.delete_range(sync);
        }
        let key = self.key();
        if self.random.once_in(rates.delete) {
            Operation::Delete { key, sync }
        } else {
            Operation::Put {
                key,
                value: self.value(),
                sync,
            }
        }
    }

    fn delete_range(&mut self, sync: bool) -> Operation {
        if self.random.once_in(3) {
            return Operation::DeletePrefix {
                prefix: self.prefix(),
            };
        }
        let mut bounds = self.bounds();
        // Everything goes too often otherwise.
        if bounds.0 == Bound::Unbounded && !self.random.once_in(3) {
            bounds.0 = Bound::Included(self.key());
        }
        Operation::DeleteRange { bounds, sync }
    }

    fn reopen(&mut self) -> Operation {
        match self.random.below(5) {
            0 => Operation::CloseAndReopen,
            1 => Operation::DropAndReopen,
            2 => Operation::KillAndReopen,
            _ => Operation::LosePowerAndReopen {
                seed: self.random.within(0..1 << 20),
            },
        }
    }

    fn maintenance(&mut self) -> Operation {
        match self.random.below(10) {
            0..=3 => Operation::Flush,
            4 | 5 => Operation::Compact {
                bounds: self.bounds(),
            },
            6 => Operation::Compact {
                bounds: (Bound::Unbounded, Bound::Unbounded),
            },
            7 => Operation::Sync,
            8 => Operation::Verify,
            _ => Operation::Checkpoint,
        }
    }

    fn held(&mut self) -> Operation {
        let slot = self.random.below(SLOTS);
        match self.random.below(6) {
            0 | 1 => Operation::TakeSnapshot { slot },
            2 => Operation::DropSnapshot { slot },
            3 => Operation::OpenScan {
                slot,
                bounds: self.bounds(),
                at: self.moment(),
            },
            _ => Operation::StepScan {
                slot,
                steps: self.random.below(20),
                seed: self.random.next(),
            },
        }
    }

    fn read(&mut self) -> Operation {
        let at = self.moment();
        match self.random.below(6) {
            0..=2 => Operation::Get {
                key: self.key(),
                at,
            },
            3 | 4 => Operation::Scan {
                bounds: self.bounds(),
                walk: self.walk(),
                limit: *self.random.choose(&[1, 10, usize::MAX]),
                at,
            },
            _ => Operation::Prefix {
                prefix: self.prefix(),
                walk: self.walk(),
                at,
            },
        }
    }

    fn prefix(&mut self) -> TestKey {
        let mut prefix = self.key().0;
        prefix.truncate(self.random.below(prefix.len() + 1));
        if self.random.once_in(8) {
            prefix.push(u8::MAX);
        }
        TestKey(prefix)
    }

    fn moment(&mut self) -> Option<usize> {
        self.random.once_in(2).then(|| self.random.below(SLOTS))
    }

    fn walk(&mut self) -> Walk {
        match self.random.below(3) {
            0 => Walk::Forward,
            1 => Walk::Backward,
            _ => Walk::Mixed(self.random.next()),
        }
    }

    fn bounds(&mut self) -> Bounds {
        let mut bound = || match self.random.below(3) {
            0 => Bound::Unbounded,
            1 => Bound::Included(()),
            _ => Bound::Excluded(()),
        };
        let (start, end) = (bound(), bound());
        let (mut low, mut high) = (self.key(), self.key());
        // Most of the time in order; empty and reversed ranges are allowed, too.
        if low.0 > high.0 && !self.random.once_in(8) {
            std::mem::swap(&mut low, &mut high);
        }
        (start.map(|()| low), end.map(|()| high))
    }

    fn key(&mut self) -> TestKey {
        let space = *self.random.choose(&self.spaces);
        TestKey(match space {
            KeySpace::Decimal { count } => {
                format!("{:016}", self.random.within(0..count)).into_bytes()
            }
            KeySpace::Zeros => {
                let len = self.random.below(5);
                (0..len)
                    .map(|_| *self.random.choose(b"\0\0\x01ab\xff"))
                    .collect()
            }
            KeySpace::LongPrefix { count } => {
                let number = self.random.within(0..count);
                let mut key = vec![b'p'; 110];
                key.extend_from_slice(format!("{number}").as_bytes());
                key
            }
            KeySpace::Binary => {
                let len = self.random.within(0..20) as usize;
                (0..len).map(|_| self.random.next() as u8 & 0x8F).collect()
            }
            KeySpace::Monotone => {
                // Sometimes an older one, to read and delete it.
                if !self.random.once_in(3) {
                    self.next_monotone += 1;
                }
                let back = self.random.within(0..20) * u64::from(self.random.once_in(2));
                self.next_monotone
                    .saturating_sub(back)
                    .to_be_bytes()
                    .to_vec()
            }
            KeySpace::Hot => b"hot".to_vec(),
            KeySpace::Longest => vec![b'l'; lightkv::KEY_LEN_MAX_BYTES],
        })
    }

    fn value(&mut self) -> TestValue {
        self.next_value += 1;
        let len = match self.random.below(if self.large_values { 16 } else { 60 }) {
            0 => 5 << 10,
            1 => *self.random.choose(&[1999, 2000, 2001]),
            2 => 0,
            3..=5 => self.random.below(1000),
            _ => self.random.below(120),
        };
        TestValue {
            len,
            seed: self.next_value,
        }
    }
}
