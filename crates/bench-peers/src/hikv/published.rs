//! What the paper says, and nothing else: F. Xia, D. Jiang, J. Xiong, N. Sun, "HiKV: A Hybrid Index Key-Value Store for
//! DRAM-NVM Memory Systems", USENIX ATC 2017.
//!
//! Numbers are those of its text. Its figures are bars and curves; what can only be read off with a ruler is left out.

/// 4.1: value length.
pub(crate) const VALUE_LEN_BYTES: usize = 256;
/// 4.1: added to each persist.
pub(crate) const WRITE_LATENCY_NS: u32 = 600;
/// 4.4, 4.5, figures 8 and 10: the ends of the axis, and its default.
pub(crate) const WRITE_LATENCIES_NS: [u32; 5] = [50, 200, 600, 1_000, 1_400];
/// 4.6: a read of twice the 60 ns of DRAM.
pub(crate) const READ_LATENCY_ADDED_NS: u32 = 60;
/// 4.6, figure 13.
pub(crate) const VALUE_LENS_BYTES: [usize; 5] = [64, 128, 256, 512, 1_024];
/// 4.6: memory of the ordered index, 2.21 GB for 50 million keys.
pub(crate) const MEMORY_BYTES_A_KEY: f64 = 2.21e9 / 50e6;
/// 4.6: memory to persistent memory, with values of 64 B, 256 B and 1 KB.
pub(crate) const MEMORY_TO_POOL: [(usize, f64); 3] = [(64, 0.40), (256, 0.158), (1_024, 0.04)];
/// 4.6: keys a second that recovery reads with one thread, and with 16.
pub(crate) const RECOVERED_A_SECOND: [f64; 2] = [50e9 / 88_240.0, 50e9 / 6_280.0];
/// 4.3: throughput with 32 threads to that with two, by workload A to F.
pub(crate) const SCALING: [f64; 6] = [13.6, 15.5, 10.5, 15.4, 4.3, 18.3];
/// 4.4, figure 9: change of throughput when the data grows 25 times.
pub(crate) const DATA_GROWTH: [(&str, &str); 3] = [
    ("put", "-14.6 %"),
    ("update", "unchanged"),
    ("delete", "-22.4 %"),
];
