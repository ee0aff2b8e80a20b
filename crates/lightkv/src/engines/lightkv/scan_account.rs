//! What the scans of a partition have paid towards fewer runs: `docs/internals/compaction.md`.
//!
//! Each run beyond the first costs a scan a read and a place in its merge. A point read hardly notices runs, so a
//! store without scans should not rewrite a byte to have fewer; one that is scanned all the time should have one. Nobody
//! tells what will come, so a merge is made once the scans so far have lost as much as it costs: whatever comes, that is
//! at most twice the cost of having known (Karlin, Manasse, Rudolph and Sleator, Algorithmica 1988: the problem
//! of renting skis). LevelDB has the same idea for point reads that miss, of which ours have none.
//!
//! While nobody asks anything of the store (`rest.rs`) a merge takes no time of anybody's, and who has scanned will scan again. So what was paid is
//! kept as credit beside that, which buys more then ([`REST_DISCOUNT`]), and is used up by that: whatever comes, merges for scans write at most
//! what scans have paid, and so many times as much again.

use std::sync::atomic::{AtomicU64, Ordering};

/// What one more read is worth, in bytes of merges: a merge of so many takes the processor about as long as
/// a read, and the device no longer.
const READ_BYTES: u64 = 16 << 10;
/// What one more source is worth whose records are in memory.
const SOURCE_BYTES: u64 = 2 << 10;
/// A byte of a merge costs so little of one while the store rests: nobody waits meanwhile, the device is only worn.
pub(crate) const REST_DISCOUNT: u64 = 4;
/// So much has to be paid before a look that was put off is taken again.
const PUT_OFF_BYTES: u64 = 1 << 20;

/// The account of a partition. Relaxed everywhere: hints, of which some may be lost.
#[derive(Debug, Default)]
pub(crate) struct ScanAccount {
    paid_bytes: AtomicU64,
    /// What has to be paid before somebody looks what it is enough for; `u64::MAX` while that is under way.
    look_at_bytes: AtomicU64,
    /// What was ever paid, less what merges have used up since: what scans are expected to pay again.
    credit_bytes: AtomicU64,
}

impl ScanAccount {
    /// Notes that a scan has taken its first records from so many runs, with so many reads. Tells the caller to have
    /// somebody look what that is enough for.
    pub(crate) fn pay(&self, runs: usize, reads: usize) -> bool {
        if runs < 2 {
            return false;
        }
        let bytes =
            (runs as u64 - 1) * SOURCE_BYTES + (reads as u64).saturating_sub(1) * READ_BYTES;
        let paid_bytes = self.paid_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.credit_bytes.fetch_add(bytes, Ordering::Relaxed);
        let look_at_bytes = self.look_at_bytes.load(Ordering::Relaxed);
        look_at_bytes <= paid_bytes
            && self
                .look_at_bytes
                .compare_exchange(
                    look_at_bytes,
                    u64::MAX,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .is_ok()
    }

    pub(crate) fn paid_bytes(&self) -> u64 {
        self.paid_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that may be merged while the store rests, where there are tables of so many. What was paid for more than that is forgotten: it
    /// was long ago.
    pub(crate) fn allowed_at_rest_bytes(&self, table_bytes: u64) -> u64 {
        let credit_bytes = self.credit_bytes.fetch_min(table_bytes, Ordering::Relaxed);
        credit_bytes.min(table_bytes).saturating_mul(REST_DISCOUNT)
    }

    /// Notes that so many bytes were merged for scans.
    pub(crate) fn merged(&self, bytes: u64) {
        let used_bytes = bytes / REST_DISCOUNT;
        let rest = |credit_bytes: u64| Some(credit_bytes.saturating_sub(used_bytes));
        let _ = self
            .credit_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest);
    }

    /// Takes over what was paid for another partition, one part of so many that its tables went to.
    pub(crate) fn inherit(&self, other: &Self, parts: u64) {
        for (own, others) in [
            (&self.paid_bytes, &other.paid_bytes),
            (&self.credit_bytes, &other.credit_bytes),
        ] {
            own.fetch_add(others.load(Ordering::Relaxed) / parts, Ordering::Relaxed);
        }
    }

    /// Whether a merge may be made for scans at all.
    pub(crate) fn has_credit(&self) -> bool {
        self.paid_bytes() > 0 || self.credit_bytes.load(Ordering::Relaxed) > 0
    }

    /// Notes what would be enough for the cheapest merge.
    pub(crate) fn set_price(&self, bytes: u64) {
        self.look_at_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Notes that there is no time for it now.
    pub(crate) fn put_off(&self) {
        self.set_price(self.paid_bytes().saturating_add(PUT_OFF_BYTES));
    }

    /// Forgets what was paid towards runs that are gone, of so many that there were.
    pub(crate) fn runs_removed(&self, removed: usize, runs: usize) {
        if removed == 0 {
            return;
        }
        let too_many = (runs as u128).saturating_sub(1);
        let left = too_many.saturating_sub(removed as u128);
        let rest = |paid_bytes: u64| Some((u128::from(paid_bytes) * left / too_many.max(1)) as u64);
        let _ = self
            .paid_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_run_costs_nothing_and_each_more_does() {
        let account = ScanAccount::default();
        assert!(!account.pay(0, 0) && !account.pay(1, 1));
        assert_eq!(account.paid_bytes(), 0);
        account.pay(4, 3);
        assert_eq!(account.paid_bytes(), 3 * SOURCE_BYTES + 2 * READ_BYTES);
        let paid_bytes = account.paid_bytes();
        account.pay(4, 0);
        assert_eq!(account.paid_bytes() - paid_bytes, 3 * SOURCE_BYTES);
    }

    #[test]
    fn one_scan_calls_for_a_look_at_a_price() {
        let account = ScanAccount::default();
        assert!(account.pay(2, 0), "nobody has looked yet");
        assert!(!account.pay(2, 0), "a look is under way");
        account.set_price(5 * SOURCE_BYTES);
        assert_eq!(
            [(); 4].map(|()| account.pay(2, 0)),
            [false, false, true, false]
        );
        account.put_off();
        let scans = (0..10_000).position(|_| account.pay(2, 0));
        assert_eq!(
            scans.map(|scans| scans as u64 + 1),
            Some(PUT_OFF_BYTES / SOURCE_BYTES)
        );
    }

    /// All merges at rest together are of no more bytes than the discount says, however often the store rests.
    #[test]
    fn what_was_paid_is_used_up_by_merges_at_rest() {
        const TABLE_BYTES: u64 = 1 << 20;
        let account = ScanAccount::default();
        assert!(!account.has_credit() && account.allowed_at_rest_bytes(TABLE_BYTES) == 0);
        (0..100).for_each(|_| _ = account.pay(3, 0));
        let paid_bytes = account.paid_bytes();
        let mut merged_bytes = 0;
        while account.allowed_at_rest_bytes(TABLE_BYTES) >= TABLE_BYTES {
            account.merged(TABLE_BYTES);
            account.runs_removed(2, 3);
            merged_bytes += TABLE_BYTES;
        }
        assert!(merged_bytes > 0 && merged_bytes <= REST_DISCOUNT * paid_bytes);
        assert_eq!(account.paid_bytes(), 0);

        // What was paid for tables that are gone is no reason to merge others for ever.
        (0..100_000).for_each(|_| _ = account.pay(3, 0));
        let allowed_bytes = account.allowed_at_rest_bytes(TABLE_BYTES);
        assert_eq!(allowed_bytes, REST_DISCOUNT * TABLE_BYTES);
        assert_eq!(
            account.allowed_at_rest_bytes(2 * TABLE_BYTES),
            allowed_bytes
        );
    }

    #[test]
    fn halves_share_what_was_paid() {
        let whole = ScanAccount::default();
        (0..100).for_each(|_| _ = whole.pay(3, 0));
        let joined = ScanAccount::default();
        for _ in 0..2 {
            let half = ScanAccount::default();
            half.inherit(&whole, 2);
            assert_eq!(half.paid_bytes(), whole.paid_bytes() / 2);
            joined.inherit(&half, 1);
        }
        assert_eq!(joined.paid_bytes(), whole.paid_bytes());
        assert_eq!(
            joined.allowed_at_rest_bytes(u64::MAX),
            whole.allowed_at_rest_bytes(u64::MAX)
        );
    }

    #[test]
    fn what_was_paid_goes_with_the_runs() {
        let account = ScanAccount::default();
        account.pay(6, 6);
        let paid_bytes = account.paid_bytes();
        account.runs_removed(0, 6);
        account.runs_removed(0, 0);
        assert_eq!(account.paid_bytes(), paid_bytes);
        account.runs_removed(4, 6);
        assert_eq!(account.paid_bytes(), paid_bytes / 5);
        account.runs_removed(1, 2);
        assert_eq!(account.paid_bytes(), 0);
        account.pay(6, 6);
        account.runs_removed(1, 1);
        assert_eq!(account.paid_bytes(), 0, "that of runs that went before");
    }
}
