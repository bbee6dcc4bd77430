//! Stores: in memory and over TCP, between threads and between processes.
#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::time::{Duration, Instant};

use ferrotitan_ext::Error;
use ferrotitan_ext::store::{Store, TcpStoreOptions};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(300);

fn options(port: u16, is_server: bool) -> TcpStoreOptions {
    TcpStoreOptions { host: "127.0.0.1".to_owned(), port, is_server, world_size: None, timeout: LONG }
}

/// A server and a client connection to it.
fn tcp() -> (Store, Store) {
    let server = Store::tcp(&options(0, true)).unwrap();
    let client = Store::tcp(&options(server.port().unwrap(), false)).unwrap();
    (server, client)
}

fn both(check: impl Fn(&Store, &Store)) {
    let hash = Store::hash();
    check(&hash, &hash.clone());
    let (server, client) = tcp();
    check(&server, &client);
    check(&client.prefix("a"), &server.prefix("a"));
}

#[test]
fn values_and_counters() {
    both(|one, other| {
        one.set("key", b"value").unwrap();
        assert_eq!(other.get("key").unwrap(), b"value");
        other.set("key", &[0, 255, 0]).unwrap();
        assert_eq!(one.get("key").unwrap(), [0, 255, 0]);
        one.set("empty", &[]).unwrap();
        assert!(other.get("empty").unwrap().is_empty());
        assert_eq!(one.add("count", 5).unwrap(), 5);
        assert_eq!(other.add("count", -7).unwrap(), -2);
        assert!(one.check("key").unwrap() && !one.check("none").unwrap());
        let keys = one.num_keys().unwrap();
        assert!(other.delete("key").unwrap() && !other.delete("key").unwrap());
        assert_eq!(one.num_keys().unwrap(), keys - 1);
        assert!(!one.check("key").unwrap());
    });
}

#[test]
fn a_large_value_goes_through() {
    let (server, client) = tcp();
    let value: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    client.set("large", &value).unwrap();
    assert_eq!(server.get("large").unwrap(), value);
}

#[test]
fn prefixes_keep_keys_apart() {
    let store = Store::hash();
    let (a, b) = (store.prefix("a"), store.prefix("b"));
    a.set("key", b"1").unwrap();
    b.set("key", b"2").unwrap();
    assert_eq!(a.get("key").unwrap(), b"1");
    assert_eq!(b.get("key").unwrap(), b"2");
    assert!(!store.check("key").unwrap());
    assert_eq!(a.prefix("inner").port(), None);
}

#[test]
fn a_wait_ends_when_the_key_comes() {
    both(|one, other| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                other.set("late", b"x").unwrap();
                other.add("later", 1).unwrap();
            });
            one.wait(&["late", "later"], LONG).unwrap();
            assert_eq!(one.get("late").unwrap(), b"x");
        });
        one.delete("late").unwrap();
        one.delete("later").unwrap();
    });
}

#[test]
fn a_wait_ends_with_its_timeout() {
    both(|one, _| {
        one.set("here", b"x").unwrap();
        let start = Instant::now();
        let error = one.wait(&["here", "never"], SHORT).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert!(
            start.elapsed() >= SHORT - Duration::from_millis(20) && start.elapsed() < LONG,
            "{:?}",
            start.elapsed()
        );
        one.wait(&["here"], SHORT).unwrap();
        one.wait(&[], SHORT).unwrap();
    });
    let (server, _) = tcp();
    let short = TcpStoreOptions { timeout: SHORT, ..options(server.port().unwrap(), false) };
    let error = Store::tcp(&short).unwrap().get("never").unwrap_err();
    assert!(error.is_timeout(), "{error}");
}

#[test]
fn a_missing_server_is_an_error_in_time() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = Instant::now();
    let error = Store::tcp(&TcpStoreOptions { timeout: Duration::from_secs(1), ..options(port, false) }).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(start.elapsed() < LONG);
    assert!(matches!(Store::tcp(&options(0, false)), Err(Error::Argument { .. })));
    let host = TcpStoreOptions { host: "a\0b".to_owned(), ..options(1, false) };
    assert!(matches!(Store::tcp(&host), Err(Error::Argument { .. })));
    let (server, _) = tcp();
    assert!(Store::tcp(&options(server.port().unwrap(), true)).is_err(), "the port is taken");
    let alone = TcpStoreOptions { world_size: Some(2), timeout: Duration::from_secs(1), ..options(0, true) };
    let error = Store::tcp(&alone).unwrap_err();
    assert!(error.is_timeout(), "{error}");
}

#[test]
fn a_lost_server_is_an_error() {
    let (server, client) = tcp();
    drop(server);
    let start = Instant::now();
    assert!(client.set("key", b"x").and_then(|()| client.get("key")).is_err());
    assert!(start.elapsed() < LONG);
}

/// The other process of the test below: this test binary again, where it does nothing unless told so.
#[test]
fn child_process() {
    if let Ok(port) = std::env::var("FERROTITAN_TEST_STORE_PORT") {
        let store = Store::tcp(&options(port.parse().unwrap(), false)).unwrap();
        store.set("child", store.get("parent").unwrap().repeat(2).as_slice()).unwrap();
    }
}

#[test]
fn two_processes_share_a_store() {
    let server = Store::tcp(&options(0, true)).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process"])
        .env("FERROTITAN_TEST_STORE_PORT", server.port().unwrap().to_string())
        .spawn()
        .unwrap();
    server.set("parent", b"ab").unwrap();
    let value = server.get("child");
    let _ = child.kill();
    child.wait().unwrap();
    assert_eq!(value.unwrap(), b"abab");
}
