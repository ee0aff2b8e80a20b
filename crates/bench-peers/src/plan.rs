//! What is measured: profiles, their lists of steps, and their sizes.

use clap::ValueEnum;
use lightkv_bench::Distribution;
use serde::{Deserialize, Serialize};

use crate::stores::{LightKvShape, StoreKind};

/// A set of lists with its sizes and its places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Profile {
    /// One directory on a device for every store, all memory limited.
    Ssd,
    /// The same with LightKV's pool on tmpfs, and the log of peers that can put it elsewhere.
    Pmem,
    /// Everything fits in memory, which is not limited; every store with its defaults.
    Memory,
    /// Everything in persistent memory, for which tmpfs stands: the engine HiKV, and LightKV with its pool there, beside
    /// RocksDB with its defaults. The directory must be on tmpfs, too.
    Tmpfs,
}

/// Name of the one list that measures opening after a kill.
pub(crate) const OPEN_LIST: &str = "open";

/// Bytes of unflushed records that are recovered there at full size.
const OPEN_BYTES: u64 = 512 << 20;

/// Steps that run one after the other on one new store in one process.
#[derive(Clone, Debug)]
pub(crate) struct List {
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
}

/// A list with the stores that run it in turn, and what is the same for all of them.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) list: List,
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) sizes: Sizes,
    /// LightKV's memory budget; `None`: its default.
    pub(crate) lightkv_budget_bytes: Option<u64>,
    /// Whether every store keeps its own defaults.
    pub(crate) defaults: bool,
    /// Whether the logs of peers that can put them elsewhere are on tmpfs.
    pub(crate) peer_logs_on_tmpfs: bool,
}

/// A store that is measured.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) kind: StoreKind,
    /// What tells it from other candidates of the same kind; `None` where there is only one.
    pub(crate) variant: Option<String>,
    /// Inner sizes of LightKV; `None`: those that follow from its memory budget.
    pub(crate) shape: Option<LightKvShape>,
}

impl Candidate {
    /// A store as its users open it.
    pub(crate) fn plain(kind: StoreKind) -> Self {
        Self {
            kind,
            variant: None,
            shape: None,
        }
    }

    /// The name in files and tables, from which [`StoreKind::of_label`] tells the kind.
    pub(crate) fn label(&self) -> String {
        let name = self.kind.name();
        self.variant
            .as_ref()
            .map_or_else(|| name.to_owned(), |variant| format!("{name}:{variant}"))
    }
}

/// One step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Step {
    /// Its name in tables.
    pub(crate) name: String,
    pub(crate) action: Action,
}

/// What a step does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Action {
    /// Runs a workload.
    Run {
        /// Its name in the driver.
        workload: String,
        /// Name of the distribution, see [`Distribution`].
        distribution: String,
        /// Operations; `None`: as many as records.
        operations: Option<u64>,
        threads: usize,
        /// Whether background work is waited for afterwards.
        settle: bool,
    },
    /// Writes what is only in memory into the store's files; a step without figures.
    Flush,
}

/// Sizes of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) records: u64,
    pub(crate) value_len_bytes: usize,
    /// For everything a store uses, page cache included; `None`: no limit.
    pub(crate) memory_limit_bytes: Option<u64>,
    /// What records and memory were multiplied with; other sizes of the stores follow.
    pub(crate) scale: f64,
}

impl List {
    pub(crate) fn new(name: impl Into<String>, steps: Vec<Step>) -> Self {
        let name = name.into();
        Self { name, steps }
    }
}

impl Profile {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ssd => "ssd",
            Self::Pmem => "pmem",
            Self::Memory => "memory",
            Self::Tmpfs => "tmpfs",
        }
    }

    /// Sizes where nothing else is asked for.
    pub(crate) fn sizes(self, scale: f64) -> Sizes {
        let scaled = |number: u64| ((number as f64 * scale) as u64).max(1);
        match self {
            Self::Ssd | Self::Pmem => Sizes {
                records: scaled(8_000_000),
                value_len_bytes: 1_024,
                memory_limit_bytes: Some(scaled(2 << 30)),
                scale,
            },
            Self::Memory => Sizes {
                records: scaled(1_000_000),
                value_len_bytes: 200,
                memory_limit_bytes: None,
                scale,
            },
            Self::Tmpfs => Sizes {
                records: scaled(5_000_000),
                value_len_bytes: 256,
                memory_limit_bytes: None,
                scale,
            },
        }
    }

    /// Stores that are measured where nothing else is asked for, as far as they are built.
    pub(crate) fn stores(self) -> Vec<StoreKind> {
        let wanted = |kind: &StoreKind| match (self, kind) {
            (Self::Ssd, StoreKind::LightkvPool) | (Self::Pmem, StoreKind::Lightkv) => false,
            (Self::Ssd | Self::Pmem | Self::Memory, StoreKind::Hikv) => false,
            (Self::Ssd | Self::Pmem, _) => true,
            (Self::Memory, kind) => kind.is_ours() || *kind == StoreKind::Rocksdb,
            (Self::Tmpfs, kind) => kind.has_pool() || *kind == StoreKind::Rocksdb,
        };
        let built = StoreKind::ALL.into_iter().filter(|kind| kind.is_built());
        built.filter(wanted).collect()
    }

    /// Our store that the lines of this profile are about.
    pub(crate) fn ours(self) -> StoreKind {
        match self {
            Self::Ssd | Self::Memory => StoreKind::Lightkv,
            Self::Pmem => StoreKind::LightkvPool,
            Self::Tmpfs => StoreKind::Hikv,
        }
    }

    /// Whether every store keeps its own defaults.
    pub(crate) fn with_defaults(self) -> bool {
        matches!(self, Self::Memory | Self::Tmpfs)
    }

    /// All lists.
    pub(crate) fn lists(self, sizes: &Sizes) -> Vec<List> {
        match self {
            Self::Ssd | Self::Pmem => vec![
                List::new("random", random_steps(sizes.records)),
                List::new("sequential", vec![fill("fillseq", "fillseq", 1, true)]),
                List::new(OPEN_LIST, vec![fill("open-load", "fillrandom", 1, false)]),
            ],
            Self::Memory => vec![
                List::new("one-thread", memory_steps("", 1)),
                List::new("two-threads", memory_steps("-two-threads", 2)),
                List::new("batches", batch_steps()),
            ],
            Self::Tmpfs => vec![List::new("in-place", in_place_steps(sizes.records))],
        }
    }
}

/// Records of the list that measures opening after a kill.
pub(crate) fn open_records(sizes: &Sizes) -> u64 {
    let record_bytes = (lightkv_bench::KEY_LEN_BYTES + sizes.value_len_bytes) as f64;
    ((OPEN_BYTES as f64 * sizes.scale / record_bytes) as u64).max(1)
}

/// A workload that puts every record once.
pub(crate) fn fill(name: &str, workload: &str, threads: usize, settle: bool) -> Step {
    run(name, workload, Distribution::Uniform, None, threads, settle)
}

/// Any workload; without a number of operations, as many as records.
pub(crate) fn run(
    name: &str,
    workload: &str,
    distribution: Distribution,
    operations: Option<u64>,
    threads: usize,
    settle: bool,
) -> Step {
    Step {
        name: name.to_owned(),
        action: Action::Run {
            workload: workload.to_owned(),
            distribution: distribution.name().to_owned(),
            operations,
            threads,
            settle,
        },
    }
}

/// A load, then everything that reads or changes it. What writes comes last and is waited for, so that no step
/// meets the debts of another.
fn random_steps(records: u64) -> Vec<Step> {
    let (points, scans) = ((records / 10).max(1), (records / 100).max(1));
    let read = |workload: &str, operations| {
        run(
            workload,
            workload,
            Distribution::Uniform,
            Some(operations),
            1,
            false,
        )
    };
    let mixed = |workload: &str, operations| {
        run(
            workload,
            workload,
            Distribution::Uniform,
            Some(operations),
            1,
            true,
        )
    };
    vec![
        fill("fillrandom", "fillrandom", 1, true),
        read("readrandom", points),
        run(
            "readrandom-zipfian",
            "readrandom",
            Distribution::Zipfian,
            Some(points),
            1,
            false,
        ),
        read("multireadrandom", scans),
        read("readmissing", points),
        read("range100", scans),
        run("readseq", "readseq", Distribution::Uniform, None, 1, false),
        mixed("readwhilewriting-instep", points),
        mixed("readwhilewriting", points),
        // As range100 above, on what the writer left.
        run(
            "range100-after-writing",
            "range100",
            Distribution::Uniform,
            Some(scans),
            1,
            false,
        ),
        mixed("range10whilewriting", scans),
        mixed("ycsba", points),
        mixed("ycsbb", points),
        read("ycsbc", points),
        mixed("ycsbf", points),
        // Last: these two add records.
        mixed("ycsbd", points),
        mixed("ycsbe", scans),
    ]
}

fn memory_steps(suffix: &str, threads: usize) -> Vec<Step> {
    let read = |name: &str| {
        let name = format!("{name}{suffix}");
        run(
            &name,
            "readrandom",
            Distribution::Uniform,
            None,
            threads,
            false,
        )
    };
    vec![
        fill(&format!("put{suffix}"), "fillrandom", threads, false),
        read("get"),
        Step {
            name: format!("flush{suffix}"),
            action: Action::Flush,
        },
        // The first reading fills caches.
        read("get-flushed-first"),
        read("get-flushed"),
    ]
}

/// Every record by a batch of a hundred, twice. An operation is a batch.
fn batch_steps() -> Vec<Step> {
    let steps = ["put-batch", "update-batch"];
    steps.map(|name| fill(name, "fillbatch", 1, false)).to_vec()
}

/// Every kind of operation on a store that is wholly in persistent memory; deletes come last.
fn in_place_steps(records: u64) -> Vec<Step> {
    let step = |name: &str, workload: &str, operations| {
        let distribution = Distribution::Uniform;
        run(name, workload, distribution, operations, 1, false)
    };
    let scans = Some((records / 100).max(1));
    vec![
        fill("put", "fillrandom", 1, false),
        step("get", "readrandom", None),
        step("scan10", "range10", scans),
        step("scan100", "range100", scans),
        step("update", "overwrite", None),
        step("delete", "deleterandom", None),
    ]
}

/// Keeps the steps that were asked for, and the load that they need; lists without any are left out.
pub(crate) fn select(lists: Vec<List>, wanted: &[String]) -> Result<Vec<List>, String> {
    if wanted.is_empty() {
        return Ok(lists);
    }
    let known = |name: &String| {
        let mut steps = lists.iter().flat_map(|list| &list.steps);
        steps.any(|step| step.name == *name) || lists.iter().any(|list| list.name == *name)
    };
    if let Some(unknown) = wanted.iter().find(|name| !known(name)) {
        let steps: Vec<_> = lists
            .iter()
            .flat_map(|list| list.steps.iter().map(|step| step.name.as_str()))
            .collect();
        return Err(format!(
            "no step is called {unknown:?}; there are: {}",
            steps.join(", ")
        ));
    }
    let chosen = lists.into_iter().filter_map(|mut list| {
        let whole = wanted.contains(&list.name);
        let asked = |step: &Step| whole || wanted.contains(&step.name);
        let last = list.steps.iter().rposition(asked)?;
        let mut place = 0;
        list.steps.retain(|step| {
            let keep = place == 0 || asked(step) || (place < last && step.action == Action::Flush);
            place += 1;
            keep
        });
        Some(list)
    });
    Ok(chosen.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(lists: &[List]) -> Vec<Vec<&str>> {
        lists
            .iter()
            .map(|list| list.steps.iter().map(|step| step.name.as_str()).collect())
            .collect()
    }

    #[test]
    fn a_selection_keeps_the_load() {
        let lists = Profile::Ssd.lists(&Profile::Ssd.sizes(0.1));
        let chosen = select(lists.clone(), &["readseq".into(), "fillseq".into()]).unwrap();
        assert_eq!(
            names(&chosen),
            [vec!["fillrandom", "readseq"], vec!["fillseq"]]
        );
        let chosen = select(lists.clone(), &[OPEN_LIST.into()]).unwrap();
        assert_eq!(names(&chosen), [vec!["open-load"]]);
        assert!(select(lists, &["fillsync".into()]).is_err());
        let lists = Profile::Memory.lists(&Profile::Memory.sizes(1.0));
        let chosen = select(lists, &["get-flushed".into()]).unwrap();
        assert_eq!(names(&chosen), [["put", "flush", "get-flushed"]]);
    }

    #[test]
    fn every_step_is_one_the_driver_knows_and_has_its_own_name() {
        for profile in [Profile::Ssd, Profile::Pmem, Profile::Memory, Profile::Tmpfs] {
            let mut seen = std::collections::HashSet::new();
            for list in profile.lists(&profile.sizes(1.0)) {
                for step in list.steps {
                    assert!(seen.insert(step.name.clone()), "{}", step.name);
                    if let Action::Run {
                        workload,
                        distribution,
                        ..
                    } = step.action
                    {
                        workload.parse::<lightkv_bench::Workload>().unwrap();
                        distribution.parse::<Distribution>().unwrap();
                    }
                }
            }
        }
    }

    #[test]
    fn scale_shrinks_records_and_memory() {
        let sizes = Profile::Ssd.sizes(0.25);
        assert_eq!(sizes.records, 2_000_000);
        assert_eq!(sizes.memory_limit_bytes, Some(512 << 20));
        assert_eq!(open_records(&sizes), (128 << 20) / 1_040);
    }
}
