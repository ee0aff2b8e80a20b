//! Progress on stderr. Nothing is drawn where stderr is not a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

const TICK: Duration = Duration::from_millis(100);

/// A bar over so many bytes.
pub(crate) fn bytes_bar(total_bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(total_bytes);
    set_style(
        &bar,
        "{bar:40} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
    );
    bar
}

/// A bar over so many operations.
pub(crate) fn operations_bar(name: &str, operations: u64) -> ProgressBar {
    let bar = ProgressBar::new(operations).with_message(name.to_owned());
    set_style(
        &bar,
        "{msg:16} {bar:40} {human_pos} of {human_len}, {per_sec}, {eta} left",
    );
    bar
}

/// A turning sign for operations that go on for a time.
pub(crate) fn operations_spinner(name: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(name.to_owned());
    set_style(
        &bar,
        "{msg:16} {spinner} {human_pos} in {elapsed}, {per_sec}",
    );
    bar
}

/// A turning sign for work of unknown length, with a count of records.
pub(crate) fn records_spinner() -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    set_style(&bar, "{spinner} {human_pos} records, {per_sec}");
    bar
}

/// A turning sign for work that cannot be counted.
pub(crate) fn spinner(doing: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(doing);
    set_style(&bar, "{spinner} {msg} for {elapsed}");
    bar
}

fn set_style(bar: &ProgressBar, template: &str) {
    // The templates are constants of this module, checked by its test; a bad one only looks plain.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(TICK);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_can_be_made_and_ended() {
        for bar in [
            bytes_bar(10),
            operations_bar("x", 10),
            operations_spinner("x"),
            records_spinner(),
            spinner("y"),
        ] {
            bar.inc(1);
            bar.finish_and_clear();
            assert!(bar.is_finished());
        }
    }
}
