//! Generated lists against the golden ones, entry for entry, and their figures.
#![allow(clippy::unwrap_used)]

use ferrotitan_schedule::{Algorithm, Costs, Lowered, Schedule, verify};

struct Golden<'a> {
    name: &'a str,
    /// `key=value` of the header; the values of `peak_live_chunks=[1, 2]` with their spaces.
    keys: Vec<(&'a str, &'a str)>,
    /// The lists in CSV form.
    csv: String,
}

impl Golden<'_> {
    fn key<T: std::str::FromStr>(&self, key: &str) -> T {
        let value = self.keys.iter().find(|(known, _)| *known == key).unwrap().1;
        value.parse().ok().unwrap()
    }
}

fn read(text: &str) -> Vec<Golden<'_>> {
    let mut all: Vec<Golden<'_>> = Vec::new();
    for line in text.lines() {
        if let Some(header) = line.strip_prefix("# ").filter(|header| header.contains('=')) {
            let Some((name, keys)) = header.split_once(' ').filter(|(_, keys)| keys.starts_with(['P', 'p'])) else {
                continue;
            };
            let (keys, peak) = keys.split_once(" peak_live_chunks=").unwrap_or((keys, ""));
            let mut keys: Vec<(&str, &str)> = keys.split(' ').map(|key| key.split_once('=').unwrap()).collect();
            keys.push(("peak_live_chunks", peak));
            all.push(Golden { name, keys, csv: String::new() });
        } else if let Some((_, list)) = line.split_once(": ").filter(|_| line.starts_with("rank")) {
            let csv = &mut all.last_mut().unwrap().csv;
            csv.push_str(&list.replace(' ', ","));
            csv.push('\n');
        }
    }
    all
}

fn assert_same(generated: &Schedule, golden: &Golden<'_>) {
    let expected = Schedule::from_csv(generated.name.clone(), &golden.csv).unwrap();
    assert_eq!(expected.ranks.len(), generated.ranks.len(), "{}", golden.name);
    for (rank, (expected, generated)) in expected.ranks.iter().zip(&generated.ranks).enumerate() {
        for (at, (expected, generated)) in expected.iter().zip(generated).enumerate() {
            assert_eq!(expected, generated, "{} {:?} rank {rank} entry {at}", golden.name, golden.keys);
        }
        assert_eq!(expected.len(), generated.len(), "{} {:?} rank {rank}", golden.name, golden.keys);
    }
    assert_eq!(&expected, generated);
}

#[test]
fn lists_are_those_of_torch() {
    let all = read(include_str!("golden/torch.txt"));
    assert_eq!(all.len(), 14);
    for golden in all {
        let algorithm: Algorithm = golden.name.parse().unwrap();
        let stages_per_rank = golden.key("stages_per_rank");
        let schedule = algorithm.generate(golden.key("pp"), stages_per_rank, golden.key("microbatches")).unwrap();
        assert_same(&schedule, &golden);
        verify(&schedule, &Costs::default()).unwrap();
    }
}

#[test]
fn single_stage_lists_and_their_figures() {
    let all = read(include_str!("golden/single.txt"));
    assert_eq!(all.len(), 12);
    for golden in all {
        let name = if golden.name == "ZB1P(H1)_V1" { "ZB1P" } else { golden.name };
        let algorithm: Algorithm = name.parse().unwrap();
        let schedule = algorithm.generate(golden.key("P"), 1, golden.key("M")).unwrap();
        assert_eq!(schedule.stages(), golden.key::<usize>("stages"));
        assert_same(&schedule, &golden);

        let report = verify(&schedule, &Costs::default()).unwrap();
        assert_eq!(report.timeline.makespan(), golden.key::<f64>("makespan"));
        assert_eq!(report.max_rank_span(), golden.key::<f64>("max_rank_span"));
        assert_eq!(report.timeline.ideal(), golden.key::<f64>("ideal"));
        let peaks: Vec<usize> = report.ranks.iter().map(|rank| rank.peak_live).collect();
        assert_eq!(format!("{peaks:?}"), golden.key::<String>("peak_live_chunks"));
    }
}

/// The lists of a file where each comes after `# name ranks stages_per_rank microbatches`.
fn read_csv(text: &str) -> Vec<(Schedule, &str)> {
    let parts = text.split("# ").skip(1).map(|part| {
        let (header, csv) = part.split_once('\n').unwrap();
        let [name, ranks, stages_per_rank, microbatches] = header.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{header}")
        };
        let [ranks, stages_per_rank, microbatches] =
            [ranks, stages_per_rank, microbatches].map(|size| size.parse().unwrap());
        (name.parse::<Algorithm>().unwrap().generate(ranks, stages_per_rank, microbatches).unwrap(), csv)
    });
    parts.collect()
}

#[test]
fn lists_of_torch_for_more_sizes() {
    let all = read_csv(include_str!("golden/torch_wide.csv"));
    assert_eq!(all.len(), 162);
    for (generated, csv) in all {
        let expected = Schedule::from_csv(generated.name.clone(), csv).unwrap();
        assert_eq!(expected.to_csv(), generated.to_csv(), "{}", generated.name);
        assert_eq!(expected, generated);
    }
}

#[test]
fn lowered_lists_of_torch_can_run() {
    let all = read_csv(include_str!("golden/torch_lowered.csv"));
    assert_eq!(all.len(), 5);
    for (generated, csv) in all {
        let lowered = Lowered::from_csv(generated.name.clone(), csv).unwrap();
        lowered.check().unwrap();
        assert_eq!(lowered.schedule(), generated);
        assert_eq!(lowered.to_csv(), csv);
    }
}
