//! CSV: PyTorch's forms, and what is not one.
#![allow(clippy::unwrap_used)]

use ferrotitan_schedule::{
    Action, Algorithm, Costs, Error, Lowered, LoweringOptions, Op, Schedule, Step, lower, verify,
};
use proptest::prelude::*;

fn steps(text: &str) -> Vec<Vec<Step>> {
    Schedule::from_csv("test", text).unwrap().ranks
}

#[test]
fn cells_of_all_kinds() {
    let (forward, backward) = (Action::forward(0, 3), Action::backward(1, 12));
    assert_eq!(
        steps(" 0F3 ,,1B12,\t1I0\r\n\r\n,,1W0,(0F3;1B12)OVERLAP_F_B,( 0F3 ; 1B12 )\n\n"),
        [
            vec![forward.into(), backward.into(), Action::input_gradient(1, 0).into()],
            vec![],
            vec![
                Action::weight_gradient(1, 0).into(),
                Step::Pair { forward, backward },
                Step::Pair { forward, backward }
            ],
        ]
    );
    assert_eq!(steps("\u{feff}0F0,0B0"), steps("0F0,0B0"));
}

#[test]
fn a_file_says_ranks_placement_and_microbatches() {
    let schedule = Schedule::from_csv("v", "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n").unwrap();
    assert_eq!((schedule.placement.as_slice(), schedule.microbatches), ([0, 1, 1, 0].as_slice(), 1));
    verify(&schedule, &Costs::default()).unwrap();
}

/// Two ranks and two microbatches of 1F1B as PyTorch lowers them, with parameters.
const LOWERED: &str = "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0RESHARD,0REDUCE_GRAD\n\
                       1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1RESHARD,1REDUCE_GRAD\n";

#[test]
fn lowered_files() {
    let lowered = Lowered::from_csv("1F1B", LOWERED).unwrap();
    assert_eq!(lowered.to_csv(), LOWERED);
    lowered.check().unwrap();
    let schedule = Schedule::from_csv("1F1B", LOWERED).unwrap();
    assert_eq!(schedule, Algorithm::OneForwardOneBackward.generate(2, 1, 2).unwrap());
    assert_eq!(lowered.schedule(), schedule);
}

#[test]
fn damaged_lowered_files_are_refused() {
    // Sending later harms nobody.
    let later = LOWERED.replacen("0SEND_F0,0F1", "0F1,0SEND_F0", 1);
    Lowered::from_csv("", &later).unwrap().check().unwrap();
    // What is changed, and what must be said.
    for (from, to, message) in [
        (
            "0F0,0SEND_F0",
            "0SEND_F0,0F0",
            "0SEND_F0 (operation 1 of rank 0) cannot run: what it sends is not computed before it",
        ),
        ("1RECV_F0,1F0,", "1F0,1RECV_F0,", "1F0 (operation 1 of rank 1) cannot run: 1RECV_F0 does not come before it"),
        ("1RECV_F1,", "", "rank 0 posts 0SEND_F1 in its place"),
        ("0RECV_B1,", "", "0B1 (operation 7 of rank 0) cannot run: 0RECV_B1 does not come before it"),
        ("1SEND_B1,", "", "0B1 (operation 8 of rank 0) cannot run: 1SEND_B1 is missing from rank 1"),
        (
            "1RECV_F0,1F0,1RECV_F1",
            "1RECV_F1,1F0,1RECV_F0",
            "1RECV_F1 (operation 1 of rank 1) cannot run: rank 0 posts 0SEND_F0 in its place",
        ),
        ("0SEND_F1,0RECV_B0", "0RECV_B0,0SEND_F1", "the transfers of two ranks keep their order"),
        ("0RECV_B0", "1RECV_F0", "1RECV_F0 (operation 5 of rank 0) cannot run: its stage is on rank 1"),
        ("0RECV_B0", "0RECV_B0,0RECV_B0", "it has been posted before"),
        ("0SEND_F0", "0SEND_F0,0SEND_F7", "there is no such microbatch"),
        ("0UNSHARD,", "", "the stage is not unsharded"),
        ("0F0,", "0F0,0UNSHARD,", "the stage is unsharded already"),
        ("0UNSHARD,0F0", "0F0,0UNSHARD", "0F0 (operation 0 of rank 0) cannot run: unshard stage 0 before it"),
        (",0RESHARD", "", "0RESHARD (operation 9 of rank 0) cannot run: it is missing at the end of the list"),
        (",0REDUCE_GRAD", "", "it is missing from the list"),
        (",0REDUCE_GRAD", ",0REDUCE_GRAD,0REDUCE_GRAD", "have been reduced already"),
        ("0B0", "0REDUCE_GRAD,0B0", "the gradients of stage 0 were reduced before it"),
        ("0RESHARD", "1RESHARD", "its stage is not on this rank"),
        ("0B0", "0B7", "0B0 cannot run: it is missing from rank 0"),
    ] {
        assert!(LOWERED.contains(from), "{from}");
        let verdict = Lowered::from_csv("", &LOWERED.replacen(from, to, 1)).unwrap().check();
        let error = verdict.unwrap_err().to_string();
        assert!(error.contains(message), "{from} -> {to}: {error}");
    }
}

/// Fine where two ranks have a queue for each direction, a deadlock where they have one for both.
#[test]
fn transfers_that_cross_are_refused() {
    let lowered = lower(&Algorithm::Interleaved1F1B.generate(2, 2, 2).unwrap(), &LoweringOptions::default()).unwrap();
    let mut crossed = lowered.clone();
    let ops = &mut crossed.ranks[0];
    let at = ops.windows(2).position(|two| matches!(two, [Op::Send(_), Op::Receive(_)])).unwrap();
    ops.swap(at, at + 1);
    let error = crossed.check().unwrap_err().to_string();
    assert_eq!(
        error,
        "1RECV_F1 (operation 1 of rank 1) cannot run: rank 0 posts 2RECV_F0 in its place; the transfers of two ranks \
         keep their order"
    );
}

#[test]
fn errors_have_places() {
    for (text, line, column, words) in [
        ("", 1, 1, "no cell"),
        (",,,\n,", 1, 1, "no cell"),
        ("0F0,0B0,x", 1, 9, "`x` is not an action"),
        ("0F0,0B0\n1F0,  1Q0", 2, 7, "`1Q0` is not an action"),
        ("0F0\n1F", 2, 1, "lacks its microbatch, as in `1F0`"),
        ("0F-1", 1, 1, "`0F-1` is not"),
        ("-1F1", 1, 1, "not an action"),
        ("0F0x", 1, 1, "not an action"),
        ("0F0 0F1", 1, 1, "not an action"),
        ("0f0", 1, 1, "not an action"),
        ("F0", 1, 1, "not an action"),
        ("99999999999999999999F0", 1, 1, "not an action"),
        ("0F9999999999", 1, 1, "not an action"),
        ("٣F0", 1, 1, "not an action"),
        ("\"0F0\"", 1, 1, "not an action"),
        ("(0F0", 1, 1, "not a pair"),
        ("0F0,(0F0;1F0)", 1, 5, "not a pair"),
        ("(0B0;1F0)OVERLAP_F_B", 1, 1, "not a pair"),
        ("(0F0;1B0;2B0)", 1, 1, "not a pair"),
        ("(0F0;1B0)OVERLAP", 1, 1, "not a pair"),
        ("((((((((((0F0;1B0)", 1, 1, "not a pair"),
        ("()", 1, 1, "not a pair"),
        ("0F0,2F0,0B0", 1, 5, "stage 2 comes here, but no cell computes stage 1"),
        ("999999999F999999999", 1, 1, "no cell computes stage 0"),
        ("0F0,0SEND_F0", 1, 5, "`0SEND_F0` concerns stage 1, which no cell computes"),
        ("0F0,1UNSHARD", 1, 5, "`1UNSHARD` concerns stage 1"),
        ("0F0,0RECV_F0", 1, 5, "no stage before it"),
        ("0F0,0SEND_B0", 1, 5, "no stage before it"),
        ("0F0,0UNSHARD3", 1, 5, "as in `0UNSHARD`"),
        ("0F0,0SEND_F", 1, 5, "lacks its microbatch"),
    ] {
        match Schedule::from_csv("test", text) {
            Err(Error::Csv { line: l, column: c, reason }) => {
                assert_eq!((l, c), (line, column), "{text}: {reason}");
                assert!(reason.contains(words), "{text}: {reason}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    let long = Schedule::from_csv("test", &"z".repeat(1 << 20)).unwrap_err().to_string();
    assert!(long.len() < 200);
}

/// What a file claims costs nothing.
#[test]
fn large_numbers_allocate_nothing() {
    let schedule = Schedule::from_csv("test", "0F999999999,0B999999999").unwrap();
    assert_eq!(
        verify(&schedule, &Costs::default()).unwrap_err().to_string(),
        "0F0 cannot run: it is missing from rank 0"
    );
}

#[test]
fn aligned_cells_show_bubbles() {
    let schedule = Algorithm::GPipe.generate(2, 1, 2).unwrap();
    assert_eq!(schedule.to_aligned_csv().unwrap(), "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_text_is_read_or_refused(
        text in "([0-9]{1,10}|[FIBW]|SEND_F|RECV_B|UNSHARD|[(;)]|OVERLAP_F_B|[,\n \r]|\\PC){0,60}",
    ) {
        judge(&text);
    }

    #[test]
    fn near_misses_are_read_or_refused(
        edits in prop::collection::vec(
            (any::<prop::sample::Index>(), prop::option::of("[0-9FIBWSENDRCV_,;()\n\u{e9}]")),
            1..6,
        ),
    ) {
        let pipe = Algorithm::DualPipeV.generate(2, 2, 4).unwrap();
        let mut text: Vec<char> = lower(&pipe, &LoweringOptions::default()).unwrap().to_csv().chars().collect();
        for (at, edit) in edits {
            let at = at.index(text.len());
            match edit {
                Some(letter) => text.insert(at, letter.chars().next().unwrap()),
                None => drop(text.remove(at)),
            }
        }
        judge(&text.into_iter().collect::<String>());
    }
}

/// Whatever is read can be judged, and written so that it is read again.
fn judge(text: &str) {
    if let Ok(lowered) = Lowered::from_csv("fuzz", text) {
        let _ = lowered.check();
        let _ = verify(&lowered.schedule(), &Costs::default());
        assert_eq!(Lowered::from_csv("fuzz", &lowered.to_csv()).unwrap(), lowered);
    }
}
