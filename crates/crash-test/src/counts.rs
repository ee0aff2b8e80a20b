//! What was tried.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::life::Life;
use crate::outcomes::Coverage;

macro_rules! counts {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// Numbers that grow while threads explore.
        #[derive(Debug, Default)]
        pub struct Counts {
            $($field: AtomicU64,)*
        }

        /// [`Counts`] at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct Totals {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Counts {
            /// The numbers now.
            pub fn totals(&self) -> Totals {
                Totals {
                    // Relaxed: each is a number of its own.
                    $($field: self.$field.load(Ordering::Relaxed),)*
                }
            }
        }

        impl Totals {
            /// Adds other totals.
            pub fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)*
            }
        }
    };
}

counts! {
    /// First lives.
    lives,
    /// Operations of first lives.
    operations,
    /// Flushes of first lives.
    flushes,
    /// Merges of first lives.
    compactions,
    /// Splits of first lives.
    splits,
    /// Joins of partitions in first lives.
    #[serde(default)]
    joins,
    /// Moments at which first lives could have crashed.
    cuts,
    /// Cuts of which every combination of every outcome was tried, torn words included.
    cuts_everything,
    /// Cuts of which every subset of whole lines or sectors was tried, and a sample of torn ones.
    cuts_every_subset,
    /// Cuts of which a sample was tried.
    cuts_sampled,
    /// States that were looked at, equal ones included.
    states_tried,
    /// States that were recovered and compared: equal images count again where something else must be found.
    states_recovered,
    /// Different images with losses in the pool alone.
    pool_images,
    /// Different images with losses in files, or without a pool.
    file_images,
    /// States left by a crash inside of a recovery.
    recovery_crashes,
    /// States left by a second crash, after more operations.
    second_crashes,
    /// States in which something was wrong.
    violations,
}

fn add(counter: &AtomicU64, count: u64) {
    // Relaxed: see `totals`.
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Counts {
    pub(crate) fn lived(&self, operations: usize, life: &Life) {
        add(&self.lives, 1);
        add(&self.operations, operations as u64);
        add(&self.cuts, life.cut_count as u64);
        add(&self.flushes, life.work.flushes);
        add(&self.compactions, life.work.compactions);
        add(&self.splits, life.work.splits);
        add(&self.joins, life.work.joins);
    }

    pub(crate) fn covered(&self, coverage: Coverage) {
        let counter = match coverage {
            Coverage::Everything => &self.cuts_everything,
            Coverage::EverySubset => &self.cuts_every_subset,
            Coverage::Sampled => &self.cuts_sampled,
        };
        add(counter, 1);
    }

    pub(crate) fn tried(&self) {
        add(&self.states_tried, 1);
    }

    pub(crate) fn recovered(&self, is_new: bool, has_lost_files: bool) {
        add(&self.states_recovered, 1);
        if is_new {
            let counter = if has_lost_files {
                &self.file_images
            } else {
                &self.pool_images
            };
            add(counter, 1);
        }
    }

    pub(crate) fn recovered_again(&self, in_recovery: bool) {
        let counter = if in_recovery {
            &self.recovery_crashes
        } else {
            &self.second_crashes
        };
        add(counter, 1);
    }

    pub(crate) fn failed(&self) {
        add(&self.violations, 1);
    }
}
