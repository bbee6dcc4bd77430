//! Which rank records where.

#![allow(clippy::unwrap_used)]

use ferrotitan_telemetry::Error;
use ferrotitan_telemetry::metrics::table::{LOSS, TOKENS_SEEN};
use ferrotitan_telemetry::metrics::{Options, Telemetry};
use ferrotitan_telemetry::tui::View;

/// Without exporters a step goes nowhere, and costs no error.
#[test]
fn nothing_is_on_unless_asked_for() {
    let telemetry = Telemetry::start(Options::default(), 0..1).unwrap();
    for rank in [0, 5] {
        let rank = telemetry.rank(rank).unwrap();
        rank.step(1, &[LOSS.is(1.0), TOKENS_SEEN.is(f64::NAN)]).unwrap();
        assert_eq!(rank.run(|| 7), 7);
    }
    telemetry.finish(std::time::Duration::ZERO).unwrap();
}

#[test]
#[cfg(not(feature = "prometheus"))]
fn what_is_not_in_the_build_is_said() {
    let options = Options { prometheus: Some(([127, 0, 0, 1], 0).into()), ..Options::default() };
    let error = Telemetry::start(options, 0..1).unwrap_err();
    assert!(matches!(error, Error::NotBuilt { feature: "prometheus", .. }), "{error}");
}

#[test]
#[cfg(feature = "prometheus")]
fn an_address_that_is_taken_is_said() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let error = Telemetry::start(Options { prometheus: Some(address), ..Options::default() }, 0..1).unwrap_err();
    assert!(matches!(error, Error::Prometheus { address: named, .. } if named == address));
    let message = error.to_string();
    assert!(message.contains("in use") && message.contains("choose an address"), "{message}");
}

/// Ranks that are processes of their own do not fight for one port.
#[test]
#[cfg(feature = "prometheus")]
fn the_address_is_that_of_exported_ranks() {
    let bind = |port| std::net::TcpListener::bind(("127.0.0.1", port));
    let free = std::iter::repeat_with(|| bind(0).unwrap().local_addr().unwrap());
    let free = free.take(100).find(|address| address.port() < u16::MAX && bind(address.port() + 1).is_ok()).unwrap();
    let options = |all_ranks| Options { prometheus: Some(free), all_ranks, ..Options::default() };
    let serves = |port: u16| std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
    let silent = Telemetry::start(options(false), 1..2).unwrap();
    assert!(!serves(free.port()) && !serves(free.port() + 1));
    drop(silent);
    let _second = Telemetry::start(options(true), 1..2).unwrap();
    assert!(!serves(free.port()) && serves(free.port() + 1));
    let error = Telemetry::start(options(true), 70_000..70_001).unwrap_err().to_string();
    assert!(error.contains("for rank 70000"), "{error}");
}

#[test]
fn a_view_is_no_exporter_of_other_ranks() {
    let view = View::new("", 1);
    let telemetry =
        Telemetry::start(Options { all_ranks: true, view: Some(view.clone()), ..Options::default() }, 0..1).unwrap();
    telemetry.rank(1).unwrap().step(9, &[LOSS.is(1.0)]).unwrap();
    assert!(!format!("{view:?}").contains("step: 9"));
    telemetry.rank(0).unwrap().step(9, &[LOSS.is(1.0)]).unwrap();
    assert!(format!("{view:?}").contains("step: 9"));
}
