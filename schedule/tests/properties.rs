//! Every generated schedule is sound, lowers, and survives the CSV form; every damaged one is judged rightly.
#![allow(clippy::unwrap_used)]

mod reference;

use ferrotitan_schedule::{
    Action, Algorithm, Costs, Kind, Lowered, LoweringOptions, Op, Schedule, Step, Unsound, lower, render, verify,
};
use proptest::prelude::*;
use reference::{any_schedule, is_sound, with_action};

#[test]
fn all_small_schedules_are_sound() {
    let mut count = 0;
    for ranks in 1..=5 {
        for stages_per_rank in 1..=4 {
            for microbatches in 1..=9 {
                let flexible = (1..=microbatches).map(|round| Algorithm::Flexible { microbatches_per_round: round });
                for algorithm in Algorithm::ALL.into_iter().chain(flexible) {
                    let Ok(schedule) = algorithm.generate(ranks, stages_per_rank, microbatches) else {
                        assert!(matches!(algorithm, Algorithm::ZbvZeroBubble | Algorithm::DualPipeV));
                        continue;
                    };
                    verify(&schedule, &Costs::default()).unwrap_or_else(|unsound| {
                        panic!("{algorithm} {ranks} {stages_per_rank} {microbatches}: {unsound}")
                    });
                    count += 1;
                }
            }
        }
    }
    assert!(count > 2000);
}

fn any_costs() -> impl Strategy<Value = Costs> {
    (0.0..3.0, 0.0..3.0, 0.0..3.0, 0.0..1.0, 0.0..=1.0, prop::collection::vec(0.0..2.0, 0..4)).prop_map(
        |(forward, input_gradient, weight_gradient, communication, overlap, stage_factors)| Costs {
            forward,
            input_gradient,
            weight_gradient,
            communication,
            overlap,
            stage_factors,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn generated_schedules_are_sound(schedule in any_schedule(), costs in any_costs()) {
        prop_assert!(is_sound(&schedule));
        let report = verify(&schedule, &costs).unwrap();
        let timeline = &report.timeline;
        prop_assert!(timeline.makespan() >= timeline.ideal() - 1e-9);
        prop_assert!((0.0..=1.0).contains(&timeline.idle_share()));
        for (rank, figures) in report.ranks.iter().enumerate() {
            prop_assert!(figures.peak_live >= 1 && figures.peak_live <= figures.peak_held);
            prop_assert!(figures.peak_held <= schedule.microbatches * schedule.stages_of(rank).len());
            prop_assert!(figures.span() >= figures.busy - 1e-9);
        }
        let svg = render::svg(timeline);
        prop_assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        prop_assert_eq!(render::text(timeline).lines().count(), schedule.ranks.len() + 2);
    }

    #[test]
    fn lowered_lists_run(
        schedule in any_schedule(),
        unshard in any::<bool>(),
        unshard_ahead in 0..4_usize,
        receive_ahead in 0..4_usize,
    ) {
        let lowered = lower(&schedule, &LoweringOptions { unshard, unshard_ahead, receive_ahead }).unwrap();
        prop_assert_eq!(lowered.schedule(), schedule.clone());
        // A message for every edge between ranks, in both directions; parameters once a stage.
        let placement = &schedule.placement;
        let cuts = placement.windows(2).filter(|pair| pair[0] != pair[1]).count();
        let count = |wanted: fn(&Op) -> bool| lowered.ranks.iter().flatten().filter(|op| wanted(op)).count();
        let messages = 2 * cuts * schedule.microbatches;
        prop_assert_eq!(count(|op| matches!(op, Op::Send(_))), messages);
        prop_assert_eq!(count(|op| matches!(op, Op::Receive(_))), messages);
        prop_assert_eq!(count(|op| matches!(op, Op::ReduceGradient(_))), schedule.stages());
        prop_assert_eq!(count(|op| matches!(op, Op::Unshard(_))), if unshard { schedule.stages() } else { 0 });
        prop_assert_eq!(count(|op| matches!(op, Op::Reshard(_))), if unshard { schedule.stages() } else { 0 });
        prop_assert_eq!(Lowered::from_csv(lowered.name.clone(), &lowered.to_csv()).unwrap(), lowered);
    }

    #[test]
    fn csv_keeps_schedules(schedule in any_schedule()) {
        let name = schedule.name.clone();
        prop_assert_eq!(&Schedule::from_csv(name.clone(), &schedule.to_csv()).unwrap(), &schedule);
        let aligned = schedule.to_aligned_csv().unwrap();
        prop_assert_eq!(&Schedule::from_csv(name, &aligned).unwrap(), &schedule);
        let widths: Vec<usize> = aligned.lines().map(|line| line.split(',').count()).collect();
        prop_assert!(widths.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

/// A way to damage a schedule.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Drop,
    Duplicate,
    SwapNeighbours,
    SwapAny,
    Kind(Kind),
    Stage(usize),
    Microbatch(usize),
    OtherRank,
    Placement,
    Fuse,
}

fn any_damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        Just(Damage::Drop),
        Just(Damage::Duplicate),
        Just(Damage::SwapNeighbours),
        Just(Damage::SwapAny),
        prop::sample::select(vec![Kind::Forward, Kind::Backward, Kind::InputGradient, Kind::WeightGradient])
            .prop_map(Damage::Kind),
        (0..33_usize).prop_map(Damage::Stage),
        (0..21_usize).prop_map(Damage::Microbatch),
        Just(Damage::OtherRank),
        Just(Damage::Placement),
        Just(Damage::Fuse),
    ]
}

fn damage(schedule: &mut Schedule, how: Damage, [which, place, other]: [prop::sample::Index; 3]) {
    let ranks = schedule.ranks.len();
    let rank = which.index(ranks);
    if schedule.ranks[rank].is_empty() {
        return;
    }
    let steps = &mut schedule.ranks[rank];
    let count = steps.len();
    let at = place.index(count);
    let second = other.index(2) == 1;
    match how {
        Damage::Drop => drop(steps.remove(at)),
        Damage::Duplicate => steps.insert(other.index(count + 1), steps[at]),
        Damage::SwapNeighbours => steps.swap(at, (at + 1).min(count - 1)),
        Damage::SwapAny => steps.swap(at, other.index(count)),
        Damage::Kind(kind) => steps[at] = with_action(steps[at], second, |action| action.kind = kind),
        Damage::Stage(stage) => steps[at] = with_action(steps[at], second, |action| action.stage = stage),
        Damage::Microbatch(index) => steps[at] = with_action(steps[at], second, |action| action.microbatch = index),
        Damage::OtherRank => {
            let step = steps.remove(at);
            schedule.ranks[other.index(ranks)].push(step);
        }
        Damage::Placement => {
            let stage = place.index(schedule.placement.len());
            schedule.placement[stage] = other.index(ranks);
        }
        Damage::Fuse => {
            // Two neighbours become a pair: sound only if neither needs the other, around all ranks.
            if let (Step::One(forward), Some(&Step::One(backward))) = (steps[at], steps.get(at + 1)) {
                steps[at] = Step::Pair { forward, backward };
                steps.remove(at + 1);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn damage_is_found(
        mut schedule in any_schedule(),
        damages in prop::collection::vec((any_damage(), any::<[prop::sample::Index; 3]>()), 1..3),
    ) {
        for (how, where_) in damages {
            damage(&mut schedule, how, where_);
        }
        let verdict = verify(&schedule, &Costs::default());
        prop_assert_eq!(verdict.is_ok(), is_sound(&schedule), "{:?}", verdict.as_ref().err());
        prop_assert_eq!(lower(&schedule, &LoweringOptions::default()).err(), verdict.clone().err());
        if let Err(Unsound::Deadlock { action, rank, position, chain }) = verdict {
            // What is named stands there; each waits for the next, in a circle.
            prop_assert!(schedule.ranks[rank][position].actions().any(|other| other == action));
            for (wait, next) in chain.iter().zip(chain.iter().cycle().skip(1)) {
                prop_assert_eq!(wait.holder, next.rank);
                let place = |wanted: Action, rank: usize| {
                    schedule.ranks[rank].iter().position(|step| step.actions().any(|action| action == wanted)).unwrap()
                };
                prop_assert!(place(wait.needs, wait.holder) >= next.position);
            }
        }
    }
}
