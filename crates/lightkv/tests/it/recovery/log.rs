//! What an operation says to the log.
//!
//! One subscriber for the whole process, which listens all the time: while none is there, or the first one
//! comes and goes, another thread's event may be the first of its place in the code, and `tracing` then
//! remembers for ever that nobody wants to hear it.

use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::Once;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

thread_local! {
    /// Of each [`logged`] that this thread is in, what was said within it and no inner one.
    static MESSAGES: RefCell<Vec<Vec<String>>> = const { RefCell::new(Vec::new()) };
}

struct Log;

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
        MESSAGES.with_borrow_mut(|messages| {
            if let Some(messages) = messages.last_mut() {
                messages.push(message.0);
            }
        });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Runs `operation` and gives what this thread logged meanwhile.
pub(super) fn logged<T>(operation: impl FnOnce() -> T) -> (T, Vec<String>) {
    static SUBSCRIBE: Once = Once::new();
    SUBSCRIBE.call_once(|| {
        tracing::subscriber::set_global_default(Log).expect("the only subscriber of this process");
    });
    MESSAGES.with_borrow_mut(|messages| messages.push(Vec::new()));
    let result = operation();
    let messages = MESSAGES.with_borrow_mut(|messages| messages.pop().expect("pushed above"));
    (result, messages)
}

/// Whether one of the messages contains a text.
pub(super) fn says(messages: &[String], text: &str) -> bool {
    messages.iter().any(|message| message.contains(text))
}
