//! What the paper says, and nothing else: S. Han, D. Jiang, J. Xiong, "LightKV: A Cross Media Key Value Store with
//! Persistent Memory to Cut Long Tail Latency", MSST 2020.
//!
//! Numbers are those of its text and of Table I. Its figures are bar charts and curves without numbers; what can only
//! be read off with a ruler is left out. Sections are named where they are used.

/// Who is compared with in the text, always in this order.
pub(crate) const RIVALS: [&str; 4] = ["LevelDB", "RocksDB", "NoveLSM", "SLM-DB"];

/// Numbers in the order of [`RIVALS`].
pub(crate) type OfRivals = [f64; 4];

/// VI-A: `MAX_LEAF_NODES`.
pub(crate) const MAX_LEAF_NODES: u64 = 2_048;
/// VI-A: a segment of the write buffer.
pub(crate) const SEGMENT_BYTES: u64 = 4 << 20;
/// VI-A: tables that one compaction merges.
pub(crate) const COMPACTION_SIZE: usize = 4;
/// VI-A, VI-B: the data to the write buffer, 100 GB to 8 GB.
pub(crate) const DATA_TO_BUFFER: f64 = 12.5;
/// VI-A, VI-B: the machine's memory to the data, 64 GB to 100 GB.
pub(crate) const MEMORY_TO_DATA: f64 = 0.64;
/// VI-B: the data, which the peers' memtables of 64 MB belong to.
pub(crate) const DATA_BYTES: u64 = 100_000_000_000;
/// VI-C: gets and scans each fetch 20 GB of it.
pub(crate) const READ_SHARE: u64 = 5;

/// VI-B: by how many times the write amplification of the others is reduced at 100 GB.
pub(crate) const WRITE_AMPLIFICATION_REDUCED: OfRivals = [7.1, 5.1, 2.9, 2.3];
/// VI-B: write amplification of LightKV at 50 and at 100 GB.
pub(crate) const WRITE_AMPLIFICATION: [f64; 2] = [1.6, 1.8];

/// VI-C: random writes, up to, over all lengths of values.
pub(crate) const RANDOM_WRITE_HIGHEST: OfRivals = [33.4, 16.3, 16.0, 12.7];
/// VI-C: random writes, average.
pub(crate) const RANDOM_WRITE_MEAN: OfRivals = [13.5, 8.3, 5.0, 4.0];
/// VI-C: random reads, up to.
pub(crate) const RANDOM_READ_HIGHEST: OfRivals = [9.2, 3.5, 9.2, 1.9];
/// VI-C: random reads, average.
pub(crate) const RANDOM_READ_MEAN: OfRivals = [4.5, 1.9, 4.2, 1.3];

/// Table I, VI-D: the lengths of values.
pub(crate) const VALUE_LENS: [(&str, usize); 5] = [
    ("256B", 256),
    ("1KB", 1_024),
    ("4KB", 4_096),
    ("16KB", 16_384),
    ("64KB", 65_536),
];

/// Table I: mean, p99 and p99.9 of reads beside writes, by length of values. The mean is in microseconds (the caption
/// says ns, which no SSD reaches), the others are in milliseconds.
#[rustfmt::skip] // A row each, as it is printed there.
pub(crate) const READ_LATENCIES: [(&str, [[f64; 3]; 5]); 5] = [
    ("LevelDB", [[294.0, 2.7, 5.8], [370.0, 3.6, 6.5], [429.0, 4.3, 7.0], [653.0, 5.7, 8.7], [829.0, 6.1, 10.2]]),
    ("RocksDB", [[106.0, 0.3, 3.6], [152.0, 2.2, 5.1], [274.0, 4.1, 6.9], [671.0, 5.9, 9.1], [1_383.0, 7.9, 14.9]]),
    ("NoveLSM", [[243.0, 0.7, 3.5], [321.0, 1.4, 8.0], [399.0, 4.1, 9.8], [524.0, 6.2, 11.1], [891.0, 8.7, 18.6]]),
    ("SLM-DB", [[81.0, 0.3, 1.5], [101.0, 0.8, 4.0], [201.0, 2.5, 4.7], [414.0, 7.5, 13.8], [641.0, 6.5, 8.1]]),
    ("LightKV", [[58.0, 0.2, 0.4], [74.0, 0.2, 2.4], [131.0, 0.8, 3.6], [258.0, 3.0, 5.5], [409.0, 4.2, 6.5]]),
];

/// VI-D: by how many times p99 of reads is reduced, up to.
pub(crate) const READ_P99_HIGHEST: OfRivals = [17.9, 10.5, 6.4, 3.5];
/// VI-D: by how many times p99.9 of reads is reduced, up to.
pub(crate) const READ_P999_HIGHEST: OfRivals = [15.7, 9.2, 8.8, 3.4];

/// VI-E: workloads A, B and F, up to.
pub(crate) const YCSB_MIXED_HIGHEST: OfRivals = [7.0, 2.0, 4.4, 1.5];
/// VI-E: workload C.
pub(crate) const YCSB_C: OfRivals = [4.7, 1.5, 4.2, 1.2];
/// VI-E: the loads of A and E.
pub(crate) const YCSB_LOAD: OfRivals = [27.4, 6.4, 12.2, 6.0];

/// Figure 13a, 13b, VI-F: the values of `MAX_LEAF_NODES` between the two that the text names.
pub(crate) const LEAF_NODES: [u64; 6] = [256, 512, 1_024, 2_048, 4_096, 8_192];
/// VI-F2: `MAX_LEAF_NODES` while the compaction size is varied.
pub(crate) const LEAF_NODES_OF_COMPACTION_SIZES: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// What Table I says of a store, in one column.
    fn column(store: &str, column: usize) -> Vec<f64> {
        let (_, rows) = READ_LATENCIES
            .into_iter()
            .find(|(name, _)| *name == store)
            .unwrap();
        rows.into_iter().map(|row| row[column]).collect()
    }

    #[test]
    fn table_and_text_agree_as_far_as_the_tables_digits_go() {
        for (place, highest) in [(1, READ_P99_HIGHEST), (2, READ_P999_HIGHEST)] {
            let own = column("LightKV", place);
            for (rival, stated) in RIVALS.into_iter().zip(highest) {
                let theirs = column(rival, place);
                let ratios = theirs.iter().zip(&own).map(|(theirs, own)| theirs / own);
                let found = ratios.fold(0.0, f64::max);
                assert!(
                    (found / stated - 1.0).abs() < 0.2,
                    "{rival} {found} {stated}"
                );
            }
        }
    }

    #[test]
    fn the_buffer_is_the_partitions_and_the_data_is_as_many_buffers() {
        let buffer_bytes = MAX_LEAF_NODES * SEGMENT_BYTES;
        assert_eq!(buffer_bytes, 8 << 30);
        let ratio = DATA_BYTES as f64 / (8e9 * DATA_TO_BUFFER);
        assert!((ratio - 1.0).abs() < 1e-9);
    }
}
