//! What devices could do at most.

/// Words of a device's name, in the order to look for them, and its peak in dense bfloat16 TFLOP/s.
const PEAKS: &[(&[&str], f64)] = &[
    (&["A100"], 312.0),
    (&["H100", "NVL"], 835.0),
    (&["H100", "PCIe"], 756.0),
    (&["H100"], 989.0),
    (&["H200"], 989.0),
    (&["B200"], 2250.0),
    (&["MI300X"], 1300.0),
];

/// The peak of a device in dense bfloat16 TFLOP/s, by the name that its driver gives it. `None` for a device that is not
/// in the table, and for a CPU: an MFU against a guess would mislead.
pub fn peak_tflops(device: &str) -> Option<f64> {
    // `GB200` is another part than `B200`, so names are compared word by word.
    let words: Vec<&str> = device.split(|c: char| !c.is_alphanumeric()).collect();
    let has = |word: &&str| words.iter().any(|known| known.eq_ignore_ascii_case(word));
    PEAKS.iter().find(|(parts, _)| parts.iter().all(has)).map(|(_, peak)| *peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_drivers_give() {
        assert_eq!(peak_tflops("NVIDIA A100-SXM4-80GB"), Some(312.0));
        assert_eq!(peak_tflops("NVIDIA H100 80GB HBM3"), Some(989.0));
        assert_eq!(peak_tflops("NVIDIA H100 NVL"), Some(835.0));
        assert_eq!(peak_tflops("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(peak_tflops("NVIDIA H200"), Some(989.0));
        assert_eq!(peak_tflops("NVIDIA B200"), Some(2250.0));
        assert_eq!(peak_tflops("AMD Instinct MI300X"), Some(1300.0));
        assert_eq!(peak_tflops("NVIDIA GB200"), None);
        assert_eq!(peak_tflops("Intel(R) Xeon(R) CPU"), None);
    }
}
