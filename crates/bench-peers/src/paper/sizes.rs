//! The sizes of the paper's experiments, shrunk to the machine.

use super::published;
use crate::plan::Sizes;
use crate::stores::LightKvShape;

/// A segment of the write buffer here: an eighth of the paper's, so that a buffer of some hundred MiB has hundreds of
/// partitions. The tables of a partition, which are what merges and scans meet, are as many as there: partitions times
/// segment is the buffer in both.
const SEGMENT_BYTES: u64 = published::SEGMENT_BYTES / 8;

/// The least that segments are shrunk to for tiny data.
const SEGMENT_BYTES_MIN: u64 = 64 << 10;

/// The fewest partitions of tiny data.
const LEAF_NODES_MIN: u64 = 4;

/// The least that a process is given: its code, threads and smallest buffers.
const MEMORY_BYTES_MIN: u64 = 128 << 20;

/// Data, and everything that keeps its ratio to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PaperSizes {
    /// What stands for the paper's 100 GB.
    pub(crate) data_bytes: u64,
}

impl PaperSizes {
    /// Records, memory and the peers' buffers for values of a length.
    pub(crate) fn of(self, value_len_bytes: usize) -> Sizes {
        let memory_bytes = (self.data_bytes as f64 * published::MEMORY_TO_DATA) as u64;
        Sizes {
            records: self.records(value_len_bytes),
            value_len_bytes,
            memory_limit_bytes: Some(memory_bytes.max(MEMORY_BYTES_MIN)),
            scale: self.data_bytes as f64 / published::DATA_BYTES as f64,
        }
    }

    /// Three quarters of the memory, the pool on tmpfs included.
    pub(crate) fn lightkv_budget_bytes(self) -> Option<u64> {
        self.of(0).memory_limit_bytes.map(|bytes| bytes / 4 * 3)
    }

    /// LightKV as the paper configures it.
    pub(crate) fn shape(self) -> LightKvShape {
        self.shape_with(published::MAX_LEAF_NODES, published::COMPACTION_SIZE)
    }

    /// LightKV with another number of leaf nodes, in the paper's counting, and another compaction size. The buffer
    /// follows the leaf nodes, as there: each has its segment.
    pub(crate) fn shape_with(self, leaf_nodes: u64, compaction_size: usize) -> LightKvShape {
        let buffer_bytes = self.data_bytes as f64 / published::DATA_TO_BUFFER;
        let segment_bytes = (buffer_bytes as u64 / 64).clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES);
        let share = leaf_nodes as f64 / published::MAX_LEAF_NODES as f64;
        let max_leaf_nodes = (buffer_bytes * share) as u64 / segment_bytes;
        let max_leaf_nodes = max_leaf_nodes.max(LEAF_NODES_MIN);
        LightKvShape {
            buffer_bytes: max_leaf_nodes * segment_bytes,
            segment_bytes,
            max_leaf_nodes: max_leaf_nodes as usize,
            compaction_size,
        }
    }

    fn records(self, value_len_bytes: usize) -> u64 {
        let record_bytes = (lightkv_bench::KEY_LEN_BYTES + value_len_bytes) as u64;
        (self.data_bytes / record_bytes).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_the_papers() {
        let sizes = PaperSizes {
            data_bytes: 4 << 30,
        };
        let shape = sizes.shape();
        let ratio = sizes.data_bytes as f64 / shape.buffer_bytes as f64;
        assert!((12.4..12.6).contains(&ratio), "{ratio}");
        assert_eq!(shape.segment_bytes, 512 << 10);
        assert_eq!(
            shape.buffer_bytes,
            shape.segment_bytes * shape.max_leaf_nodes as u64
        );
        let four_times = sizes.shape_with(8_192, 4);
        assert!(four_times.max_leaf_nodes.abs_diff(4 * shape.max_leaf_nodes) < 4);
        // 64 MB for 100 GB.
        let memtable_bytes = (64 << 20) as f64 * sizes.of(1_024).scale;
        assert!((2.8e6..3.0e6).contains(&memtable_bytes), "{memtable_bytes}");
    }

    #[test]
    fn tiny_data_still_has_partitions() {
        let sizes = PaperSizes {
            data_bytes: 1 << 20,
        };
        let shape = sizes.shape_with(64, 2);
        assert_eq!((shape.max_leaf_nodes, shape.compaction_size), (4, 2));
        assert_eq!(shape.segment_bytes, 64 << 10);
        assert_eq!(sizes.of(1_024).records, (1 << 20) / 1_040);
    }
}
