//! The counts of a run: `RELIABILITY.json`, and the page that is generated from it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::counts::Totals;
use crate::io_errors::ErrorTotals;

/// One run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The commit that was tested; ends with `+` if the tree had changes.
    pub commit: String,
    /// The command line without the program.
    pub arguments: Vec<String>,
    /// The first seed.
    pub seed: u64,
    /// Duration, in seconds.
    pub seconds: f64,
    /// Processor time of the process, in seconds.
    pub processor_seconds: f64,
    /// Processors of the machine.
    pub processors: usize,
    /// Crashes, by configuration.
    pub crashes: BTreeMap<String, Totals>,
    /// Failing calls, by configuration.
    pub errors: BTreeMap<String, ErrorTotals>,
    /// Failures that were found; a run ends at the first.
    pub violations: u64,
}

impl Report {
    /// All configurations together.
    pub fn totals(&self) -> Totals {
        let mut all = Totals::default();
        self.crashes.values().for_each(|totals| all.add(totals));
        all
    }

    /// All failing calls together.
    pub fn error_totals(&self) -> ErrorTotals {
        let mut all = ErrorTotals::default();
        self.errors.values().for_each(|totals| all.add(totals));
        all
    }

    /// The page `docs/reliability.md`.
    pub fn page(&self) -> String {
        let mut page = String::from(HEAD);
        let all = self.totals();
        let errors = self.error_totals();
        let exhausted = all.cuts_everything + all.cuts_every_subset;
        let explored = exhausted + all.cuts_sampled;
        let percent = |part: u64, whole: u64| {
            if whole == 0 {
                "-".into()
            } else {
                format!("{:.1} %", part as f64 * 100.0 / whole as f64)
            }
        };
        let mut row = |what: &str, value: String| {
            let _ = writeln!(page, "| {what} | {value} |");
        };
        row("commit", format!("`{}`", self.commit));
        row(
            "command",
            format!("`lightkv-crash-test {}`", self.arguments.join(" ")),
        );
        row("first seed", self.seed.to_string());
        row(
            "machine time",
            format!(
                "{:.0} s on {} processors, {:.0} s of processor time",
                self.seconds, self.processors, self.processor_seconds
            ),
        );
        row(
            "**violations**",
            format!("**{}**", grouped(self.violations)),
        );
        row("lives, operations in them", {
            format!("{}, {}", grouped(all.lives), grouped(all.operations))
        });
        row("flushes, merges, splits in them", {
            format!(
                "{}, {}, {}",
                grouped(all.flushes),
                grouped(all.compactions),
                grouped(all.splits)
            )
        });
        row("cuts explored", grouped(explored));
        row("of them every combination or every subset", {
            percent(exhausted, explored)
        });
        row("different images, losses in the pool alone", {
            grouped(all.pool_images)
        });
        row(
            "different images, losses in files",
            grouped(all.file_images),
        );
        row("states recovered and compared", {
            grouped(all.states_recovered + all.recovery_crashes + all.second_crashes)
        });
        row(
            "crashes inside of a recovery",
            grouped(all.recovery_crashes),
        );
        row("second crashes after 20 operations", {
            grouped(all.second_crashes)
        });
        row("failing calls, reported by the store", {
            format!(
                "{}, {}",
                grouped(errors.faults),
                grouped(errors.faults_reported)
            )
        });
        row("states recovered after failing calls", {
            grouped(errors.states_recovered)
        });
        page.push_str("\n## By configuration\n\n");
        page.push_str(
            "| configuration | cuts: every combination, every subset, sampled | images: pool, files | in recovery | second crash |\n\
             |---|---|---|---|---|\n",
        );
        for (name, totals) in &self.crashes {
            let _ = writeln!(
                page,
                "| `{name}` | {}, {}, {} | {}, {} | {} | {} |",
                grouped(totals.cuts_everything),
                grouped(totals.cuts_every_subset),
                grouped(totals.cuts_sampled),
                grouped(totals.pool_images),
                grouped(totals.file_images),
                grouped(totals.recovery_crashes),
                grouped(totals.second_crashes),
            );
        }
        page.push_str(
            "\n| configuration | calls that could fail | failing calls tried | reported | states recovered |\n\
             |---|---|---|---|---|\n",
        );
        for (name, totals) in &self.errors {
            let _ = writeln!(
                page,
                "| `{name}` | {} | {} | {} | {} |",
                grouped(totals.calls),
                grouped(totals.faults),
                grouped(totals.faults_reported),
                grouped(totals.states_recovered),
            );
        }
        page
    }
}

const HEAD: &str = "# Reliability: what was tried\n\n\
    Generated from `RELIABILITY.json` by `lightkv-crash-test report`; not written by hand. What the words mean is in\n\
    [crash testing](internals/crash-testing.md).\n\n\
    | what | count |\n|---|---|\n";

/// A number with its thousands apart.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The commit of the working tree, with `+` if it was changed; "unknown" where there is no repository.
pub fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_string())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return "unknown".into();
    };
    let is_changed = git(&["status", "--porcelain"]).is_none_or(|changes| !changes.is_empty());
    commit + if is_changed { "+" } else { "" }
}

/// Processor time of this process so far, in seconds; 0 where the system does not say.
pub fn processor_seconds() -> f64 {
    // User and system time are fields 14 and 15, in ticks of which Linux shows 100 a second; the second
    // field may hold spaces, and ends with the last parenthesis.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    let fields = after.split_whitespace().skip(11).take(2);
    let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
    ticks as f64 / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_sums_and_survives_its_file() {
        let totals = Totals {
            pool_images: 1_234_567,
            cuts_everything: 3,
            cuts_sampled: 1,
            ..Totals::default()
        };
        let report = Report {
            commit: "abc".into(),
            crashes: BTreeMap::from([("one".into(), totals), ("two".into(), totals)]),
            ..Report::default()
        };
        let text = serde_json::to_string(&report).unwrap();
        let read: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(read, report);
        let page = read.page();
        assert!(
            page.contains("2,469,134") && page.contains("75.0 %"),
            "{page}"
        );
    }

    #[test]
    fn processor_time_passes() {
        let before = processor_seconds();
        let mut sum = 0_u64;
        while processor_seconds() <= before {
            sum = sum.wrapping_add((0..1_000_000_u64).sum());
        }
        assert!(sum > 0);
    }
}
