//! Random lives: few keys, so that versions meet; small values, so that one fence covers few lines.

use crate::operation::{Bytes, Operation, ValueOf};
use crate::random::Random;

/// Draws operations. Values of one generator are numbered, so that no two are equal.
#[derive(Debug)]
pub struct Generator {
    random: Random,
    next_value: u64,
    /// Values from this length on are in files of their own.
    large_value_bytes: usize,
}

impl Generator {
    /// Numbers of values begin at `first_value`: above those of an earlier life of the same store.
    pub fn new(seed: u64, first_value: u64, large_value_bytes: usize) -> Self {
        Self {
            random: Random::of(seed, 0x6E6),
            next_value: first_value,
            large_value_bytes,
        }
    }

    /// The next `count` operations.
    pub fn operations(&mut self, count: usize) -> Vec<Operation> {
        (0..count).map(|_| self.operation()).collect()
    }

    fn operation(&mut self) -> Operation {
        match self.random.below(100) {
            0..=48 => Operation::Put {
                key: self.key(),
                value: self.value(),
                sync: self.random.once_in(5),
            },
            49..=51 => self.delete_range(),
            52..=64 => Operation::Delete { key: self.key() },
            65..=79 => Operation::Batch {
                writes: (0..self.random.within(2..7))
                    .map(|_| {
                        let is_put = !self.random.once_in(4);
                        (self.key(), is_put.then(|| self.value()))
                    })
                    .collect(),
            },
            80..=86 => Operation::Flush,
            87..=89 => Operation::Compact,
            90..=95 => Operation::Sync,
            96 => {
                self.next_value += 1;
                Operation::Checkpoint {
                    number: self.next_value,
                }
            }
            _ => Operation::Reopen,
        }
    }

    fn delete_range(&mut self) -> Operation {
        let (mut from, mut to) = (self.key(), Some(self.key()));
        if let Some(high) = &mut to
            && *high < from
        {
            std::mem::swap(&mut from, high);
        }
        match self.random.below(6) {
            0 => from = Bytes::default(),
            1 => to = None,
            _ => {}
        }
        let sync = self.random.once_in(5);
        Operation::DeleteRange { from, to, sync }
    }

    fn value(&mut self) -> ValueOf {
        self.next_value += 1;
        let len_bytes = match self.random.below(24) {
            0 => 0,
            1 => self.large_value_bytes + 5,
            2..=5 => self.random.within(60..200) as usize,
            _ => self.random.within(1..40) as usize,
        };
        ValueOf {
            len_bytes,
            number: self.next_value,
        }
    }

    fn key(&mut self) -> Bytes {
        let number = self.random.below(14);
        Bytes(match self.random.below(8) {
            0 => vec![0; number % 4],
            1 => {
                let mut key = vec![b'p'; 70];
                key.push(b'a' + number as u8);
                key
            }
            2 => vec![0xFF - number as u8, 0x80],
            _ => format!("key{:02}", number * 7).into_bytes(),
        })
    }
}
