//! Power losses of persistent memory.

use lightkv_crash_test::configuration::CONFIGURATIONS;

use crate::explore;

#[test]
fn power_losses_of_a_pool_are_survived() {
    for configuration in CONFIGURATIONS.iter().filter(|known| known.pool.is_some()) {
        explore(configuration, 8, 1);
    }
}
