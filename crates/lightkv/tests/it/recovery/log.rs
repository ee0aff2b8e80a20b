//! What an operation says to the log.

use std::fmt::Debug;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().push(message.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Runs `operation` and gives what this thread logged meanwhile.
pub(super) fn logged<T>(operation: impl FnOnce() -> T) -> (T, Vec<String>) {
    let log = Log::default();
    let result = tracing::subscriber::with_default(log.clone(), operation);
    let messages = std::mem::take(&mut *log.0.lock());
    (result, messages)
}

/// Whether one of the messages contains a text.
pub(super) fn says(messages: &[String], text: &str) -> bool {
    messages.iter().any(|message| message.contains(text))
}
