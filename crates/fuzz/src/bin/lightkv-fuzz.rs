//! Runs fuzz targets: under libFuzzer if it was built for that, else with inputs that are mutated at random.
//!
//! Under libFuzzer all arguments are its own, and the environment says what to do: `LIGHTKV_FUZZ_TARGET` names the
//! target; with `LIGHTKV_FUZZ_LIST` the targets are listed, with `LIGHTKV_FUZZ_SEEDS` their seeds are
//! written to that directory. `tools/fuzz/run.py` sets these.

#![cfg_attr(fuzzing, no_main)]

use lightkv_fuzz::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[cfg(fuzzing)]
mod under_libfuzzer {
    //! One binary for all targets: what is instrumented takes minutes to build.

    use std::path::Path;
    use std::sync::OnceLock;

    use lightkv_fuzz::{Target, find, print_targets, write_seeds};

    fn target() -> &'static Target {
        static TARGET: OnceLock<&Target> = OnceLock::new();
        TARGET.get_or_init(|| {
            let name = std::env::var("LIGHTKV_FUZZ_TARGET").unwrap_or_default();
            find(&name).unwrap_or_else(|| panic!("LIGHTKV_FUZZ_TARGET={name} is no target"))
        })
    }

    fn obey_environment() {
        if std::env::var_os("LIGHTKV_FUZZ_LIST").is_some() {
            print_targets();
            std::process::exit(0);
        }
        if let Some(directory) = std::env::var_os("LIGHTKV_FUZZ_SEEDS") {
            write_seeds(Path::new(&directory)).expect("seeds are written");
            std::process::exit(0);
        }
    }

    libfuzzer_sys::fuzz_target!(init: obey_environment(), |input: &[u8]| target().check(input));
}

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    commands::run()
}

#[cfg(not(fuzzing))]
mod commands {
    //! What can be done without libFuzzer.

    use std::fs;
    use std::path::Path;
    use std::process::ExitCode;
    use std::time::Instant;

    use lightkv_fuzz::{Mutator, TARGETS, Target, find, print_targets, write_seeds};

    const USAGE: &str = "usage: lightkv-fuzz list | seeds DIRECTORY | random [TARGET] COUNT [SEED] | replay TARGET FILE...";

    /// Obeys the command line.
    pub(super) fn run() -> ExitCode {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let result = match arguments[..] {
            ["list"] => {
                print_targets();
                Ok(())
            }
            ["seeds", directory] => {
                write_seeds(Path::new(directory)).map_err(|error| error.to_string())
            }
            ["random", count] => random(TARGETS, count, "1"),
            ["random", name, count] => one(name).and_then(|target| random(&[target], count, "1")),
            ["random", name, count, seed] => {
                one(name).and_then(|target| random(&[target], count, seed))
            }
            ["replay", name, ref files @ ..] => one(name).and_then(|target| replay(target, files)),
            _ => Err(USAGE.to_string()),
        };
        match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(message) => {
                eprintln!("{message}");
                ExitCode::FAILURE
            }
        }
    }

    fn one(name: &str) -> Result<Target, String> {
        find(name)
            .copied()
            .ok_or(format!("there is no target {name}"))
    }

    fn random(targets: &[Target], count: &str, seed: &str) -> Result<(), String> {
        let number = |text: &str| text.parse().map_err(|_| format!("{text} is no number"));
        let (count, seed): (u64, u64) = (number(count)?, number(seed)?);
        for target in targets {
            let mut mutator = Mutator::new((target.seeds)(), target.len_max_bytes, seed);
            let begin = Instant::now();
            for _ in 0..count {
                target.check(&mutator.input());
            }
            let per_second = count as f64 / begin.elapsed().as_secs_f64();
            println!(
                "{}: {count} executions, {per_second:.0} a second",
                target.name
            );
        }
        Ok(())
    }

    fn replay(target: Target, files: &[&str]) -> Result<(), String> {
        for file in files {
            let input = fs::read(file).map_err(|error| format!("{file}: {error}"))?;
            target.check(&input);
            println!("{file}: right");
        }
        Ok(())
    }
}
