//! stats, verify, checkpoint, compact, and the way in.

use crate::command::{Store, bare_command, data_set, json, run};

const COUNTERS: [&str; 23] = [
    "puts",
    "gets_hit",
    "gets_miss",
    "fences",
    "flushed_lines",
    "pool_bytes_written",
    "journal_bytes_written",
    "table_bytes_written",
    "table_bytes_read",
    "table_reads",
    "table_reads_polled",
    "cache_fill_bytes",
    "leaf_probes",
    "false_matches",
    "splits",
    "flushes",
    "compactions",
    "scan_compactions",
    "range_deletions",
    "table_drops",
    "stalls",
    "stall_us_total",
    "stall_us_max",
];

const LEVELS: [&str; 10] = [
    "flushed_keys",
    "index_bytes_flushed",
    "index_bytes_memory",
    "buffer_bytes",
    "cache_bytes",
    "partitions",
    "tables",
    "range_deletions",
    "pending_bytes",
    "pending_jobs",
];

fn loaded() -> Store {
    let store = Store::new();
    store.must(&["import", data_set().to_str().unwrap()]);
    store
}

#[test]
fn stats_have_every_number() {
    let store = loaded();
    let stats = json(&store.must(&["stats", "--json"]));
    for name in COUNTERS {
        assert!(stats["counters"][name].is_u64(), "{name}");
    }
    for name in LEVELS {
        assert!(stats["levels"][name].is_u64(), "{name}");
    }
    assert_eq!(stats["engine"], "lightkv");
    assert_eq!(stats["durability"]["acknowledged"], "process_crash");
    assert_eq!(stats["durability"]["synced"], "power_loss");
    let text = store.must(&["stats"]);
    assert!(
        text.contains("an acknowledged write survives kill -9"),
        "{text}"
    );
    for name in COUNTERS.iter().chain(&LEVELS) {
        assert!(text.contains(name), "{name}");
    }
}

#[test]
fn verify_finds_a_sound_store_sound() {
    let store = loaded();
    assert!(store.must(&["verify"]).starts_with("no damage found"));
    let report = json(&store.must(&["verify", "--json"]));
    let entries = report["table_entries"].as_u64().unwrap();
    let buffered = report["buffered_records"].as_u64().unwrap();
    assert!(entries + buffered >= 34_889, "{report}");
}

#[test]
fn a_checkpoint_is_a_store() {
    let store = loaded();
    let copy = store.beside("copy");
    let copy_text = copy.to_str().unwrap();
    store.must(&["checkpoint", copy_text]);
    store.must(&["delete", "01F600"]);
    let found = run(bare_command(&["get", "01F600", "--dir", copy_text]), b"");
    assert_eq!(found.succeeded(), "GRINNING FACE; So\n");
    store.run(&["get", "01F600"]).failed(3, &[]);
    let again = store.run(&["checkpoint", copy_text]);
    again.failed(1, &[copy_text]);
}

#[test]
fn compact_keeps_the_data() {
    let store = loaded();
    let before = store.must(&["scan"]);
    store.must(&["compact"]);
    assert!(store.must(&["scan"]) == before);
    store.must(&["compact", "--from", "00", "--to", "01"]);
    let report = json(&store.must(&["compact", "--json"]));
    assert!(report["space_bytes"].as_u64().unwrap() > 0);
    assert!(store.must(&["scan"]) == before);
}

#[test]
fn a_pool_holds_the_fresh_data() {
    let store = Store::new();
    let pool = store.beside("pool");
    let pool = pool.to_str().unwrap();
    store.must(&["put", "k", "v", "--pmem-path", pool]);
    assert_eq!(store.must(&["get", "k", "--pmem-path", pool]), "v\n");
    store.must(&["verify", "--pmem-path", pool]);
    let without = store.run(&["get", "k"]);
    assert_eq!(
        without.code, 1,
        "a store that was created with a pool needs it"
    );
}

#[test]
fn help_version_and_wrong_usage() {
    let help = run(bare_command(&["--help"]), b"").succeeded();
    for command in [
        "put",
        "get",
        "delete",
        "scan",
        "import",
        "export",
        "stats",
        "verify",
        "checkpoint",
        "compact",
        "bench",
    ] {
        assert!(help.contains(command), "{command}");
    }
    assert!(
        run(bare_command(&["--version"]), b"")
            .succeeded()
            .starts_with("lightkv ")
    );
    let wrong = run(bare_command(&["frobnicate"]), b"");
    assert_eq!(wrong.code, 2);
    assert!(wrong.stderr.contains("frobnicate"));
    let store = Store::new();
    store.run(&["put", "k"]).stderr.contains("required");
    assert_eq!(store.run(&["put", "k"]).code, 2);
}
