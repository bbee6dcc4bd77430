//! Bytes as people read them.

/// Bytes with a unit that suits them.
pub fn in_units(value: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = value;
    let mut unit = 0;
    while value.abs() >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value.abs() < 100.0);
    format!("{value:.digits$} {}", UNITS[unit])
}
