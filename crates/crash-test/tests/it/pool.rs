//! Power losses of persistent memory.

use lightkv_crash_test::configuration::CONFIGURATIONS;

use crate::explore;

#[test]
fn power_losses_of_a_pool_are_survived() {
    for configuration in CONFIGURATIONS.iter().filter(|known| known.pool.is_some()) {
        let totals = explore(configuration, 8, 1);
        // One thing with many outcomes that is open everywhere would leave nothing but samples. The first cut is one.
        let whole = totals.cuts_everything + totals.cuts_every_subset;
        assert!(totals.cuts_sampled <= 1 + whole / 10, "{totals:?}");
    }
}
