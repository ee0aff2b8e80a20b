//! The machine a comparison ran on, as the kernel describes it.

use std::fs;

use serde_json::{Value, json};

/// Processor, memory, kernel.
pub(crate) fn describe() -> Value {
    let processor = field("/proc/cpuinfo", "model name");
    let memory_kib = field("/proc/meminfo", "MemTotal")
        .and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    json!({
        "processor": processor,
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_mib": memory_kib.map(|kib| kib >> 10),
        "kernel": kernel.trim(),
    })
}

fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
