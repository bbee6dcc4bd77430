//! The memory of this process, from Linux's `/proc`.

use std::fs;

use crate::ffi;

/// Resident bytes now; `None` where `/proc` does not tell.
pub fn rss() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// Resident bytes at most, since the start; `None` where `/proc` does not tell.
pub fn peak_rss() -> Option<u64> {
    status_bytes("VmHWM:")
}

/// Gives free heap memory back to the system, where the allocator is glibc's.
pub fn trim() {
    // SAFETY: no preconditions.
    unsafe { ffi::ft_malloc_trim() };
}

fn status_bytes(field: &str) -> Option<u64> {
    parse_status(&fs::read_to_string("/proc/self/status").ok()?, field)
}

fn parse_status(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::parse_status;

    #[test]
    fn reads_the_field_in_bytes() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t     7 kB\n";
        assert_eq!(parse_status(status, "VmHWM:"), Some(2048 * 1024));
        assert_eq!(parse_status(status, "VmRSS:"), Some(7 * 1024));
        assert_eq!(parse_status(status, "VmSwap:"), None);
        assert_eq!(parse_status("VmRSS: many kB", "VmRSS:"), None);
    }
}
