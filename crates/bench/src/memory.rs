//! Peak memory of the process, as the kernel counts it.

use std::fs;

/// Starts a new peak at the present resident size. Where the kernel refuses, the peak since the start of
/// the process is what [`peak_bytes`] goes on to report.
pub(crate) fn reset_peak() {
    // "5" resets the high-water mark (proc(5), since Linux 4.0). A refusal only makes the figure larger.
    let _refused = fs::write("/proc/self/clear_refs", "5");
}

/// Peak resident memory since [`reset_peak`], in bytes, mapped files included; 0 if the kernel does not
/// tell.
pub(crate) fn peak_bytes() -> u64 {
    fs::read_to_string("/proc/self/status")
        .ok()
        .as_deref()
        .and_then(parse_peak)
        .unwrap_or(0)
}

fn parse_peak(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_form() {
        assert_eq!(
            parse_peak("Name:\tx\nVmHWM:\t    1234 kB\nVmRSS:\t 1 kB\n"),
            Some(1_263_616)
        );
        assert_eq!(parse_peak("Name:\tx\n"), None);
    }

    #[test]
    fn a_big_allocation_raises_the_peak() {
        let before_bytes = peak_bytes();
        let block = vec![1_u8; 256 << 20];
        assert!(std::hint::black_box(&block).len() == 256 << 20);
        assert!(peak_bytes() > before_bytes.min(64 << 20) + (150 << 20));
    }
}
