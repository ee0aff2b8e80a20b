//! Lives lives, and tries what crashes could leave of them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;

use crate::configuration::{Configuration, Crash, Medium};
use crate::contents::{Digest, Expectation};
use crate::counts::Counts;
use crate::generator::Generator;
use crate::life::{Cut, Life, live};
use crate::operation::Operation;
use crate::outcomes::{
    Coverage, FilesOutcome, Loss, PoolOutcomes, Selection, files_outcomes, selections,
};
use crate::random::Random;
use crate::recover::recover;
use crate::script::{Script, ScriptedLife, check, left_by};

/// Combinations of a pool's and a file system's outcomes up to which all are tried.
const COMBINATIONS_MAX: usize = 4096;
/// At one cut in so many a process is killed with the power on, and the power goes during or after the recovery.
const KILLED_CUTS_EVERY: usize = 3;
/// Operations between a recovery and the second crash.
const SECOND_LIFE_OPERATIONS: usize = 20;

/// How much is tried.
#[derive(Clone, Debug)]
pub struct Plan {
    /// From which everything is drawn.
    pub seed: u64,
    /// Operations of a first life.
    pub operations: usize,
    /// Random combinations where not all are tried.
    pub random_count: usize,
    /// Ways of losing files that are tried at one cut.
    pub files_outcomes_max: usize,
    /// One recovered state in so many lives on and crashes again; 0 for none.
    pub second_crash_every: u64,
    /// Cuts of a second life at which it crashes.
    pub second_cuts: usize,
    /// Threads that recover.
    pub threads: usize,
    /// When to stop, whatever is left.
    pub deadline: Option<Instant>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            seed: 1,
            operations: 40,
            random_count: 200,
            files_outcomes_max: 64,
            second_crash_every: 40,
            second_cuts: 8,
            threads: thread::available_parallelism().map_or(1, usize::from),
            deadline: None,
        }
    }
}

/// Explores lives and adds up what was seen.
#[derive(Debug, Default)]
pub struct Explorer {
    /// Images seen in any life.
    seen: Mutex<HashSet<u64>>,
    /// What was tried.
    pub counts: Counts,
}

/// What the threads of one life share.
struct Task<'a> {
    explorer: &'a Explorer,
    plan: &'a Plan,
    configuration: &'static Configuration,
    operations: &'a [Operation],
    cuts: &'a [Cut],
    next_cut: AtomicUsize,
    /// What recoveries found, by image and by what may be found: cuts next to each other share most states.
    found: Mutex<HashMap<u64, Digest>>,
    failure: Mutex<Option<Script>>,
    stops: AtomicBool,
}

/// A state that a crash left.
struct State<'a> {
    cut: &'a Cut,
    pool: Option<(&'a PoolOutcomes, &'a Selection)>,
    files: &'a FilesOutcome,
}

impl State<'_> {
    fn losses(&self) -> Vec<Loss> {
        let mut losses = self.files.losses.clone();
        if let Some((outcomes, selection)) = self.pool {
            losses.extend(outcomes.losses(selection));
        }
        losses
    }

    fn hash(&self) -> u64 {
        let pool = self
            .pool
            .map_or(0, |(outcomes, selection)| outcomes.hash(selection));
        pool ^ self.files.hash.rotate_left(17)
    }

    fn medium(&self, is_tracked: bool) -> Medium {
        let pool = self
            .pool
            .map(|(outcomes, selection)| outcomes.image(selection));
        if is_tracked {
            Medium::tracked(pool, &self.files.files)
        } else {
            Medium::untracked(pool, &self.files.files)
        }
    }
}

impl Explorer {
    /// Lives one life of a configuration and tries every cut of it.
    ///
    /// # Errors
    /// The first failure that was found.
    pub fn explore(
        &self,
        configuration: &'static Configuration,
        plan: &Plan,
    ) -> Result<(), Script> {
        let mut generator = Generator::new(plan.seed, 0, configuration.large_value_bytes);
        let operations = generator.operations(plan.operations);
        self.explore_operations(configuration, plan, &operations)
    }

    /// As [`Explorer::explore`], with given operations.
    ///
    /// # Errors
    /// The first failure that was found.
    pub fn explore_operations(
        &self,
        configuration: &'static Configuration,
        plan: &Plan,
        operations: &[Operation],
    ) -> Result<(), Script> {
        let script = |message, operations: &[Operation]| Script {
            configuration: configuration.name.into(),
            seed: plan.seed,
            message,
            lives: vec![ScriptedLife {
                operations: operations.to_vec(),
                cut: None,
                losses: Vec::new(),
                is_killed: false,
                is_before_flush: false,
            }],
        };
        let life = live_alone(configuration, operations.to_vec())
            .map_err(|message| script(message, operations))?;
        self.counts.lived(operations.len(), &life);
        let task = Task {
            explorer: self,
            plan,
            configuration,
            operations,
            cuts: &life.cuts,
            next_cut: AtomicUsize::new(0),
            found: Mutex::default(),
            failure: Mutex::default(),
            stops: AtomicBool::new(false),
        };
        thread::scope(|scope| {
            for index in 0..plan.threads {
                let task = &task;
                scope.spawn(move || {
                    keep_to_one_processor(index);
                    task.run();
                });
            }
        });
        match task.failure.into_inner() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}

impl Explorer {
    /// Different images that were recovered.
    pub fn different_states(&self) -> u64 {
        let totals = self.counts.totals();
        totals.pool_images + totals.file_images
    }
}

/// Recoveries start threads of their own unless there is one processor: a state is then three times cheaper.
fn keep_to_one_processor(index: usize) {
    let mut set = rustix::thread::CpuSet::new();
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else {
        return;
    };
    let processors: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU)
        .filter(|processor| allowed.is_set(*processor))
        .collect();
    if let Some(processor) = processors.get(index % processors.len().max(1)) {
        set.set(*processor);
        // Without it everything takes longer, and nothing else.
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
}

/// Lives on a thread that has never used a store, with nobody beside it: what the engine frees, and when,
/// then depends on the operations alone.
fn live_alone(
    configuration: &'static Configuration,
    operations: Vec<Operation>,
) -> Result<Life, String> {
    let run = move || {
        let medium = Medium::empty(configuration);
        let start = Arc::new(Expectation::nothing());
        live(configuration, &medium, &start, &operations, |_| true)
    };
    let joined = thread::spawn(run).join();
    joined.unwrap_or_else(|_| Err("panicked without a crash; the message is above".into()))
}

impl Task<'_> {
    fn run(&self) {
        // Relaxed: only that no cut is taken twice.
        while let Some(cut) = self.cuts.get(self.next_cut.fetch_add(1, Ordering::Relaxed)) {
            if self.is_over() {
                return;
            }
            self.explore_cut(cut);
        }
    }

    fn is_over(&self) -> bool {
        let is_late = |deadline| Instant::now() >= deadline;
        self.stops.load(Ordering::Relaxed) || self.plan.deadline.is_some_and(is_late)
    }

    fn explore_cut(&self, cut: &Cut) {
        self.explore_power_losses(cut);
        // After kill -9 all is there at first, and what a recovery has shown must stay. Not with a journal: there only a
        // sync promises that, and recoveries do not wait for one.
        if self.configuration.pool.is_some()
            && self.plan.second_crash_every > 0
            && cut.index.is_multiple_of(KILLED_CUTS_EVERY)
            && !self.is_over()
        {
            self.explore_kill(cut, false);
        }
        if cut.before_flush.is_some()
            && self.plan.second_crash_every > 0
            && cut.index % KILLED_CUTS_EVERY == 1
            && !self.is_over()
        {
            self.explore_kill(cut, true);
        }
    }

    fn explore_kill(&self, cut: &Cut, is_before_flush: bool) {
        let pool = match is_before_flush {
            true => cut.before_flush.clone(),
            false => cut.pool.clone(),
        };
        let medium = Medium::killed(pool, &cut.files);
        let first = ScriptedLife {
            is_killed: true,
            is_before_flush,
            ..self.first_life(cut, Vec::new())
        };
        let seed = Random::of(self.plan.seed, cut.index as u64).next_u64();
        self.crash_again(first, &medium, &cut.expectation, seed);
    }

    fn explore_power_losses(&self, cut: &Cut) {
        let seed = self.plan.seed ^ (cut.index as u64) << 20;
        let (files, files_coverage) = match self.configuration.crash {
            Crash::Kill => {
                let (mut all, _) = files_outcomes(&cut.files, seed, 0, 1);
                all.truncate(1);
                (all, Coverage::Everything)
            }
            Crash::PowerLoss => files_outcomes(
                &cut.files,
                seed,
                self.plan.random_count / 4,
                self.plan.files_outcomes_max,
            ),
        };
        let Some(model) = &cut.pool else {
            self.explorer.counts.covered(files_coverage);
            for files in &files {
                self.try_state(&State {
                    cut,
                    pool: None,
                    files,
                });
            }
            return;
        };
        let pool = PoolOutcomes::of(model, seed);
        let (chosen, coverage) = selections(&pool.counts(), seed, self.plan.random_count);
        self.explorer.counts.covered(coverage.min(files_coverage));
        let visit = |selection: &Selection, files: &FilesOutcome| {
            self.try_state(&State {
                cut,
                pool: Some((&pool, selection)),
                files,
            });
        };
        if chosen.len().saturating_mul(files.len()) <= COMBINATIONS_MAX {
            for selection in &chosen {
                for files in &files {
                    visit(selection, files);
                }
            }
            return;
        }
        // Files kept and lost with every pool; every way of files with the pool kept and lost; and a sample.
        let files_lost = files.iter().max_by_key(|files| files.losses.len());
        for selection in &chosen {
            visit(selection, &files[0]);
            if let Some(files) = files_lost {
                visit(selection, files);
            }
        }
        let sum = |selection: &&Selection| {
            selection
                .iter()
                .map(|outcome| u64::from(*outcome))
                .sum::<u64>()
        };
        let extremes = chosen.iter().min_by_key(sum).into_iter();
        for selection in extremes.chain(chosen.iter().max_by_key(sum)) {
            for files in &files {
                visit(selection, files);
            }
        }
        let mut random = Random::of(seed, 5);
        for _ in 0..self.plan.random_count {
            visit(
                &chosen[random.below(chosen.len())],
                &files[random.below(files.len())],
            );
        }
    }

    fn try_state(&self, state: &State<'_>) {
        if self.is_over() {
            return;
        }
        let counts = &self.explorer.counts;
        counts.tried();
        let image = state.hash();
        let expectation = &state.cut.expectation;
        let known = image ^ expectation.fingerprint();
        if self.found.lock().contains_key(&known) {
            return;
        }
        let medium = state.medium(false);
        let found = recover(self.configuration, &medium, expectation);
        let is_new = self.explorer.seen.lock().insert(image);
        let has_lost_files = state.pool.is_none() || !state.files.losses.is_empty();
        counts.recovered(is_new, has_lost_files);
        match found {
            Ok(digest) if expectation.allows(digest) => {
                self.found.lock().insert(known, digest);
            }
            Ok(_) | Err(_) => {
                let message = check(self.configuration, &state.medium(false), expectation)
                    .err()
                    .or(found.err())
                    .unwrap_or_else(|| "differs from one recovery to the next".into());
                self.fail(vec![self.first_life(state.cut, state.losses())], message);
                return;
            }
        }
        let every = self.plan.second_crash_every;
        if is_new && every > 0 && Random::of(image, 7).once_in(every) {
            let first = self.first_life(state.cut, state.losses());
            self.crash_again(first, &state.medium(true), expectation, image);
        }
    }

    fn first_life(&self, cut: &Cut, losses: Vec<Loss>) -> ScriptedLife {
        // What would have come after the crash has no part in it.
        let end = cut.operation.map_or(0, |operation| operation + 1);
        ScriptedLife {
            operations: self.operations[..end].to_vec(),
            cut: Some(cut.index),
            losses,
            is_killed: false,
            is_before_flush: false,
        }
    }

    /// Recovers on a medium that is watched, goes on for some operations, and crashes in either.
    fn crash_again(
        &self,
        first: ScriptedLife,
        medium: &Medium,
        start: &Arc<Expectation>,
        seed: u64,
    ) {
        let counts = &self.explorer.counts;
        let first_value = 1 << 32;
        let mut generator = Generator::new(seed, first_value, self.configuration.large_value_bytes);
        let operations = generator.operations(SECOND_LIFE_OPERATIONS);
        // The cuts of a recovery are few and come first: more of them.
        let keeps = move |index: usize| {
            let every = if index < 12 { 3 } else { 12 };
            Random::of(seed, index as u64).once_in(every)
        };
        let second = |cut, losses| ScriptedLife {
            operations: operations.clone(),
            cut,
            losses,
            is_killed: false,
            is_before_flush: false,
        };
        let life = match live(self.configuration, medium, start, &operations, keeps) {
            Ok(life) => life,
            Err(message) => {
                self.fail(vec![first, second(None, Vec::new())], message);
                return;
            }
        };
        let mut random = Random::of(seed, 8);
        let mut cuts: Vec<&Cut> = life.cuts.iter().collect();
        while cuts.len() > self.plan.second_cuts {
            cuts.swap_remove(random.below(cuts.len()));
        }
        for cut in cuts {
            for losses in self.losses_of(cut, random.next_u64()) {
                let (medium, expectation) = left_by(cut, &losses, false);
                let found = recover(self.configuration, &medium, &expectation);
                counts.recovered_again(cut.operation.is_none());
                if found
                    .as_ref()
                    .is_ok_and(|digest| expectation.allows(*digest))
                {
                    continue;
                }
                let (medium, _) = left_by(cut, &losses, false);
                let message = check(self.configuration, &medium, &expectation)
                    .err()
                    .or(found.err())
                    .unwrap_or_else(|| "differs from one recovery to the next".into());
                self.fail(vec![first, second(Some(cut.index), losses)], message);
                return;
            }
        }
    }

    /// Everything kept, everything lost, and two random ways.
    fn losses_of(&self, cut: &Cut, seed: u64) -> Vec<Vec<Loss>> {
        if self.configuration.crash == Crash::Kill {
            return vec![Vec::new()];
        }
        let (files, _) = files_outcomes(&cut.files, seed, 4, 4);
        let pool = cut.pool.as_ref().map(|model| PoolOutcomes::of(model, seed));
        let mut random = Random::of(seed, 9);
        let mut all = Vec::new();
        for round in 0..4 {
            let mut losses = match round {
                0 => Vec::new(),
                1 => files[files.len().min(2) - 1].losses.clone(),
                _ => files[random.below(files.len())].losses.clone(),
            };
            if let Some(pool) = &pool {
                let selection: Selection = pool
                    .counts()
                    .into_iter()
                    .map(|count| match round {
                        0 => count - 1,
                        1 => 0,
                        _ => random.within(0..u64::from(count)) as u32,
                    })
                    .collect();
                losses.extend(pool.losses(&selection));
            }
            all.push(losses);
        }
        all.dedup();
        all
    }

    fn fail(&self, lives: Vec<ScriptedLife>, message: String) {
        self.stops.store(true, Ordering::Relaxed);
        self.explorer.counts.failed();
        self.failure.lock().get_or_insert(Script {
            configuration: self.configuration.name.into(),
            seed: self.plan.seed,
            message,
            lives,
        });
    }
}
