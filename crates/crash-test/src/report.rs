//! What checks counted: `RELIABILITY.json`, and the page that is generated from it.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::counts::Totals;
use crate::io_errors::ErrorTotals;

/// What one part of a check counted; each prints it as one line of JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Which check.
    pub check: String,
    /// What tells it from the others of the check, for example a configuration.
    pub part: String,
    /// The first seed.
    pub seed: u64,
    /// Duration, in seconds.
    pub seconds: f64,
    /// Failures that were found.
    pub violations: u64,
    /// Numbers by their names.
    pub counts: BTreeMap<String, u64>,
    /// The commit that was tested; ends with `+` if the tree had changes. Empty until it is gathered.
    #[serde(default)]
    pub commit: String,
    /// The last commit before it that changed what is tested.
    #[serde(default)]
    pub engine_commit: String,
    /// What was run.
    #[serde(default)]
    pub command: String,
    /// Processor time with that of children, in seconds.
    #[serde(default)]
    pub processor_seconds: f64,
    /// Processors of the machine.
    #[serde(default)]
    pub processors: usize,
}

impl Part {
    /// Crashes of one configuration.
    pub fn of_crashes(configuration: &str, seed: u64, seconds: f64, totals: &Totals) -> Self {
        Self {
            check: "crashes".into(),
            part: configuration.into(),
            seed,
            seconds,
            violations: totals.violations,
            counts: named(totals),
            ..Self::default()
        }
    }

    /// Failing calls of one configuration.
    pub fn of_errors(configuration: &str, seed: u64, seconds: f64, totals: &ErrorTotals) -> Self {
        Self {
            check: "failing calls".into(),
            part: configuration.into(),
            seed,
            seconds,
            violations: 0,
            counts: named(totals),
            ..Self::default()
        }
    }
}

/// The fields of a struct of numbers, with their names as words.
fn named(totals: &impl Serialize) -> BTreeMap<String, u64> {
    let value = serde_json::to_value(totals).expect("numbers have a text");
    let fields = value.as_object().expect("a struct");
    fields
        .iter()
        .map(|(name, number)| (name.replace('_', " "), number.as_u64().unwrap_or(0)))
        .filter(|(name, _)| name != "violations")
        .collect()
}

/// The parts of all checks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// In the order in which they are shown.
    pub parts: Vec<Part>,
}

/// A check, as the page shows it.
struct Check {
    name: &'static str,
    title: &'static str,
    /// Names of counts, in the order of the columns.
    columns: &'static [&'static str],
}

const CHECKS: [Check; 9] = [
    Check {
        name: "crashes",
        title: "Crashes at every fence, sync and acknowledgement",
        columns: &[
            "lives",
            "cuts everything",
            "cuts every subset",
            "cuts sampled",
            "pool images",
            "file images",
            "recovery crashes",
            "second crashes",
        ],
    },
    Check {
        name: "failing calls",
        title: "Failing calls of the file system",
        columns: &["calls", "faults", "faults reported", "states recovered"],
    },
    Check {
        name: "kills",
        title: "Processes killed",
        columns: &[
            "cycles",
            "killed before open",
            "killed before writes",
            "killed in writes",
            "closed",
            "operations acknowledged",
        ],
    },
    Check {
        name: "power losses",
        title: "File systems that lose power",
        columns: &[
            "power losses",
            "before open",
            "before writes",
            "in writes",
            "after a close",
            "volumes",
        ],
    },
    Check {
        name: "corruption",
        title: "Damaged files",
        columns: &["images"],
    },
    Check {
        name: "histories",
        title: "Histories of several threads",
        columns: &["histories", "calls", "range deletions", "crashes"],
    },
    Check {
        name: "sequences",
        title: "Random operations on many option sets",
        columns: &["sequences", "operations", "crashes"],
    },
    Check {
        name: "fuzzing",
        title: "Inputs of every decoder",
        columns: &["executions", "edges"],
    },
    Check {
        name: "models",
        title: "Every order of steps, Miri, address sanitizer",
        columns: &["tests"],
    },
];

/// What a long run has to reach.
struct Goal {
    what: &'static str,
    check: &'static str,
    /// Empty: every part of the check.
    part: &'static str,
    count: &'static str,
    least: u64,
}

const fn goal(
    what: &'static str,
    (check, part): (&'static str, &'static str),
    count: &'static str,
    least: u64,
) -> Goal {
    Goal {
        what,
        check,
        part,
        count,
        least,
    }
}

const GOALS: [Goal; 12] = [
    goal(
        "different states of persistent memory recovered",
        ("crashes", ""),
        "pool images",
        5_000_000,
    ),
    goal(
        "states left by a crash inside of a recovery",
        ("crashes", ""),
        "recovery crashes",
        500_000,
    ),
    goal(
        "states left by a second crash, 20 operations later",
        ("crashes", ""),
        "second crashes",
        500_000,
    ),
    goal(
        "different states of files recovered",
        ("crashes", ""),
        "file images",
        500_000,
    ),
    goal(
        "failing calls, each call of a life in every way",
        ("failing calls", ""),
        "faults",
        4_000,
    ),
    goal(
        "cycles of a process that is killed",
        ("kills", ""),
        "cycles",
        2_000,
    ),
    goal(
        "power losses of ext4",
        ("power losses", "ext4"),
        "power losses",
        1_000,
    ),
    goal(
        "power losses of XFS",
        ("power losses", "xfs"),
        "power losses",
        1_000,
    ),
    goal("damaged stores", ("corruption", ""), "images", 500_000),
    goal(
        "histories that have an order",
        ("histories", ""),
        "histories",
        10_000,
    ),
    goal(
        "sequences that match an ordered map",
        ("sequences", ""),
        "sequences",
        10_000,
    ),
    goal(
        "executions of fuzz targets",
        ("fuzzing", ""),
        "executions",
        100_000_000,
    ),
];

/// Of the cuts so many percent have every combination or every subset tried.
const EXHAUSTED_LEAST_PERCENT: f64 = 95.0;

impl Report {
    fn of<'a>(&'a self, check: &'a str) -> impl Iterator<Item = &'a Part> {
        self.parts.iter().filter(move |part| part.check == check)
    }

    /// The sum of one count of a check.
    pub fn sum(&self, check: &str, count: &str) -> u64 {
        self.of(check)
            .filter_map(|part| part.counts.get(count))
            .sum()
    }

    /// Failures that were found.
    pub fn violations(&self) -> u64 {
        self.parts.iter().map(|part| part.violations).sum()
    }

    /// The page `docs/reliability.md`.
    pub fn page(&self) -> String {
        let mut page = String::from(HEAD);
        self.write_goals(&mut page);
        page.push_str(CHECKS_HEAD);
        self.write_costs(&mut page);
        for check in &CHECKS {
            self.write_check(&mut page, check);
        }
        page
    }

    fn write_goals(&self, page: &mut String) {
        let mut row = |what: &str, least: String, reached: String, is_reached: bool| {
            let verdict = if is_reached { "yes" } else { "**no**" };
            let _ = writeln!(page, "| {what} | {least} | {reached} | {verdict} |");
        };
        for goal in &GOALS {
            let reached: u64 = self
                .of(goal.check)
                .filter(|part| goal.part.is_empty() || part.part == goal.part)
                .filter_map(|part| part.counts.get(goal.count))
                .sum();
            row(
                goal.what,
                grouped(goal.least),
                grouped(reached),
                reached >= goal.least,
            );
        }
        let sum = |count| self.sum("crashes", count);
        let exhausted = sum("cuts everything") + sum("cuts every subset");
        let explored = exhausted + sum("cuts sampled");
        let percent = exhausted as f64 * 100.0 / explored.max(1) as f64;
        row(
            "cuts with every combination or every subset tried",
            format!("{EXHAUSTED_LEAST_PERCENT} %"),
            format!("{percent:.1} %"),
            percent >= EXHAUSTED_LEAST_PERCENT,
        );
        let violations = self.violations();
        row(
            "violations",
            "0".into(),
            grouped(violations),
            violations == 0,
        );
    }

    fn write_costs(&self, page: &mut String) {
        for check in &CHECKS {
            let parts: Vec<&Part> = self.of(check.name).collect();
            if parts.is_empty() {
                let _ = writeln!(page, "| {} | not run | | | | |", check.name);
                continue;
            }
            // Parts of one command carry the figures of all of it.
            let mut runs: Vec<&Part> = parts.clone();
            runs.dedup_by(|a, b| a.command == b.command && !a.command.is_empty());
            let mut commits: Vec<String> = runs
                .iter()
                .map(|part| match part.engine_commit.as_str() {
                    "" => format!("`{}`", part.commit),
                    engine => format!("`{}`, engine `{engine}`", part.commit),
                })
                .collect();
            commits.dedup();
            let mut seeds: Vec<String> = parts.iter().map(|part| part.seed.to_string()).collect();
            seeds.dedup();
            let _ = writeln!(
                page,
                "| {} | {} | {} | {:.0} s | {:.0} s | {} |",
                check.name,
                commits.join("; "),
                seeds.join(", "),
                parts.iter().map(|part| part.seconds).sum::<f64>(),
                runs.iter().map(|part| part.processor_seconds).sum::<f64>(),
                grouped(parts.iter().map(|part| part.violations).sum()),
            );
        }
    }

    fn write_check(&self, page: &mut String, check: &Check) {
        let parts: Vec<&Part> = self.of(check.name).collect();
        if parts.is_empty() {
            return;
        }
        let _ = write!(page, "\n## {}\n\n", check.title);
        let _ = writeln!(page, "| part | {} |", check.columns.join(" | "));
        let _ = writeln!(page, "|---|{}", "---|".repeat(check.columns.len()));
        for part in &parts {
            let cells: Vec<String> = check
                .columns
                .iter()
                .map(|column| grouped(part.counts.get(*column).copied().unwrap_or(0)))
                .collect();
            let _ = writeln!(page, "| {} | {} |", part.part, cells.join(" | "));
        }
        let mut commands: Vec<&str> = parts.iter().map(|part| part.command.as_str()).collect();
        commands.dedup();
        commands.retain(|command| !command.is_empty());
        if !commands.is_empty() {
            let _ = writeln!(page, "\n```console\n$ {}\n```", commands.join("\n$ "));
        }
    }
}

const HEAD: &str = "# Reliability: what was tried\n\n\
    Generated from `RELIABILITY.json`, which `tools/reliability/run.py --long` writes; not written by hand. What the\n\
    words mean is in [crash testing](internals/crash-testing.md).\n\n\
    | what | goal | count | reached |\n|---|---|---|---|\n";

const CHECKS_HEAD: &str = "\n## Checks\n\n\
    | check | commit | first seed | time | processor time | violations |\n|---|---|---|---|---|---|\n";

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

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str) -> Part {
        let totals = Totals {
            pool_images: 1_234_567,
            cuts_everything: 3,
            cuts_sampled: 1,
            ..Totals::default()
        };
        Part {
            commit: "abc".into(),
            engine_commit: "ab0".into(),
            command: format!("crash-test {name}"),
            ..Part::of_crashes(name, 7, 1.5, &totals)
        }
    }

    #[test]
    fn a_page_has_the_sums_and_survives_its_file() {
        let report = Report {
            parts: vec![part("one"), part("two")],
        };
        let text = serde_json::to_string(&report).unwrap();
        let read: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(read, report);
        let page = read.page();
        assert!(
            page.contains("| 5,000,000 | 2,469,134 | **no** |"),
            "{page}"
        );
        assert!(page.contains("| 95 % | 75.0 % | **no** |"), "{page}");
        assert!(
            page.contains("| crashes | `abc`, engine `ab0` | 7 | 3 s | 0 s | 0 |"),
            "{page}"
        );
        assert!(page.contains("| kills | not run |"), "{page}");
        assert!(
            page.contains("$ crash-test one\n$ crash-test two\n"),
            "{page}"
        );
    }

    #[test]
    fn a_goal_is_reached_only_if_all_of_it_is() {
        let mut report = Report {
            parts: vec![part("one")],
        };
        report.parts[0]
            .counts
            .insert("pool images".into(), 5_000_000);
        assert!(report.page().contains("5,000,000 | 5,000,000 | yes |"));
        assert!(report.page().contains("| violations | 0 | 0 | yes |"));
        report.parts[0].violations = 1;
        assert!(report.page().contains("| violations | 0 | 1 | **no** |"));
    }

    #[test]
    fn what_a_test_prints_is_a_part() {
        let line = r#"{"check": "kills", "part": "journal", "seed": 1, "seconds": 12.3, "violations": 0,
            "counts": {"cycles": 700}, "commit": "abc", "processor_seconds": 3.5, "processors": 2}"#;
        let part: Part = serde_json::from_str(line).unwrap();
        assert_eq!(part.counts["cycles"], 700);
        let page = Report { parts: vec![part] }.page();
        assert!(page.contains("| journal | 700 | 0 |"), "{page}");
    }
}
