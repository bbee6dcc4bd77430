//! Pictures.
#![allow(clippy::unwrap_used)]

use ferrotitan_schedule::{Action, Algorithm, Costs, Error, Span, Step, Timeline, render, simulate};

#[test]
fn text_shows_times_bubbles_and_pairs() {
    let schedule = Algorithm::DualPipeV.generate(2, 2, 4).unwrap();
    let picture = render::text(&simulate(&schedule, &Costs { overlap: 1.0, ..Costs::per_rank(2) }).unwrap());
    let lines: Vec<&str> = picture.lines().collect();
    assert_eq!(lines.len(), 4);
    assert!(lines[0].starts_with("DualPipeV: makespan "), "{picture}");
    assert!(lines[2].contains(" 0F3;3B1 "), "{picture}");
    assert!(lines[3].starts_with("rank 1  ...."), "{picture}");
    // Bubbles are as wide as what they wait for.
    assert_eq!(lines[3].find("1F0"), Some(8 + lines[2].find("0F1").unwrap() - lines[2].find("0F0").unwrap()));
}

#[test]
fn svg_names_all_it_shows() {
    let schedule = Algorithm::DualPipeV.generate(2, 2, 4).unwrap();
    let svg = render::svg(&simulate(&schedule, &Costs::per_rank(2)).unwrap());
    let count = |text: &str| svg.matches(text).count();
    // One bar an action, two stages' shades of four kinds in the legend, one background and one track a rank.
    let actions: usize = (0..2).map(|rank| schedule.actions(rank).count()).sum();
    assert_eq!(count("<rect"), actions + 8 + 1 + 2);
    assert_eq!(count("<g>"), count("</g>"));
    for words in ["rank 1", "0F3 with 3B1", "W weight gradient", "% idle", "makespan ", "earlier stages"] {
        assert!(svg.contains(words), "{words}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
    // One stage a rank has one shade, and no word of it.
    let plain = render::svg(&simulate(&Algorithm::GPipe.generate(2, 1, 2).unwrap(), &Costs::default()).unwrap());
    assert!(!plain.contains("earlier stages") && !plain.contains("weight gradient"));
}

#[test]
fn measured_times_look_the_same() {
    let span = |action: Action, start: f64, end: f64| Span { step: Step::One(action), start, end };
    let measured = Timeline::new(
        "measured",
        "ms",
        vec![
            vec![span(Action::forward(0, 0), 1000.0, 1012.5), span(Action::backward(0, 0), 1055.0, 1080.0)],
            vec![span(Action::forward(1, 0), 1013.0, 1026.0), span(Action::backward(1, 0), 1026.0, 1053.0)],
        ],
    )
    .unwrap();
    assert_eq!(measured.makespan(), 80.0);
    assert_eq!(measured.ideal(), 40.0);
    let text = render::text(&measured);
    assert!(text.starts_with("measured: makespan 80 ms, ideal 40 ms, bubble 40 ms (100.0 % of the ideal"), "{text}");
    assert!(render::svg(&measured).contains(">ms</text>"));

    for spans in [
        vec![span(Action::forward(0, 0), 1.0, 0.0)],
        vec![span(Action::forward(0, 0), 0.0, f64::NAN)],
        vec![span(Action::forward(0, 0), f64::NEG_INFINITY, 0.0)],
        vec![span(Action::forward(0, 0), 0.0, 2.0), span(Action::forward(0, 1), 1.0, 3.0)],
    ] {
        assert!(matches!(Timeline::new("", "", vec![spans]), Err(Error::Span { rank: 0, .. })));
    }
}

#[test]
fn odd_timelines_have_pictures() {
    let span = |start, end| Span { step: Step::One(Action::forward(0, 123)), start, end };
    for ranks in [
        vec![],
        vec![vec![]],
        vec![vec![], vec![span(5.0, 5.0)]],
        vec![vec![span(0.0, 5e-324)]],
        vec![vec![span(0.0, 1e-300), span(1.0, 2.0)]],
        vec![vec![span(0.0, 1e-300)]],
        vec![vec![span(0.0, 1e300)]],
        vec![vec![span(0.0, 1e-9), span(1.0, 1e9)]],
        vec![vec![span(-1e308, 1e308)]],
    ] {
        let Ok(timeline) = Timeline::new("odd", "s", ranks.clone()) else { continue };
        assert_eq!(render::text(&timeline).lines().count(), ranks.len() + 2);
        let svg = render::svg(&timeline);
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("\"inf"), "{ranks:?}");
    }
}

#[test]
fn names_cannot_break_out() {
    let timeline = Timeline::new("<script>&\"\n\u{1b}[31m", "<ms>", vec![vec![]]).unwrap();
    let svg = render::svg(&timeline);
    assert!(svg.contains("&lt;script&gt;&amp;&quot;") && !svg.contains("<script") && !svg.contains('\u{1b}'));
    let text = render::text(&timeline);
    assert!(!text.contains('\u{1b}') && text.lines().count() == 3);
}
