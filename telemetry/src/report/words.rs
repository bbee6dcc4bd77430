//! Ranks and times as a person would say them.

/// `rank 3`, `ranks 1 and 2`, `ranks 0 to 2, 5 and 7`; the ranks ascending.
pub(super) fn ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [rank] => format!("rank {rank}"),
        _ => {
            let mut parts: Vec<String> = Vec::new();
            for run in ranks.chunk_by(|a, b| a + 1 == *b) {
                match run {
                    [first, _, .., last] => parts.push(format!("{first} to {last}")),
                    _ => parts.extend(run.iter().map(usize::to_string)),
                }
            }
            let last = parts.pop().unwrap_or_default();
            let separator = if parts.is_empty() { "" } else { " and " };
            format!("ranks {}{separator}{last}", parts.join(", "))
        }
    }
}

/// `wait` or `waits`.
pub(super) fn verb(ranks: &[usize], plural: &str) -> String {
    if ranks.len() == 1 { format!("{plural}s") } else { plural.to_owned() }
}

/// `41 s`, `0.3 s`.
pub(super) fn seconds(seconds: f64) -> String {
    if seconds >= 10.0 { format!("{seconds:.0} s") } else { format!("{seconds:.1} s") }
}

/// Nanoseconds from one time to another, in seconds.
pub(super) fn between(begin: i64, end: i64) -> f64 {
    end.saturating_sub(begin).max(0) as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_ranks_are_short() {
        assert_eq!(ranks(&[4]), "rank 4");
        assert_eq!(ranks(&[0, 1]), "ranks 0 and 1");
        assert_eq!(ranks(&[0, 1, 2]), "ranks 0 to 2");
        assert_eq!(ranks(&[0, 1, 2, 5, 7]), "ranks 0 to 2, 5 and 7");
        assert_eq!(ranks(&[0, 2, 3, 4]), "ranks 0 and 2 to 4");
        assert_eq!((verb(&[1], "wait"), verb(&[1, 2], "wait")), ("waits".to_owned(), "wait".to_owned()));
        assert_eq!((seconds(0.26), seconds(41.2)), ("0.3 s".to_owned(), "41 s".to_owned()));
    }
}
