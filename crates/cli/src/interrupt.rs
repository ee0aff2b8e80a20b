//! Signals by which somebody asks the command to end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::failure::Failure;

/// For a command that has to clean up: the first SIGINT or SIGTERM asks it to end, the second one ends the process at once, as either does elsewhere.
#[derive(Debug)]
pub(crate) struct Interrupt {
    asked: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

impl Interrupt {
    /// Listens from here on, to the end of the process.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let (asked, signal) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let register = |number| -> io::Result<()> {
            // In this order: the first one must not find what this signal sets, and who sees the flag finds the number.
            flag::register_conditional_default(number, Arc::clone(&asked))?;
            flag::register_usize(number, Arc::clone(&signal), number as usize)?;
            flag::register(number, Arc::clone(&asked))?;
            Ok(())
        };
        [SIGINT, SIGTERM]
            .into_iter()
            .try_for_each(register)
            .map_err(|error| Failure::during("cannot listen to signals", error))?;
        Ok(Self { asked, signal })
    }

    /// Set when somebody has asked.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.asked)
    }

    /// How the command ends when it does so because somebody has asked.
    pub(crate) fn failure(&self) -> Failure {
        Failure::Interrupted {
            signal: self.signal.load(Ordering::SeqCst) as u8,
        }
    }
}
