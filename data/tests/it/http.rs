//! Files of a web server: the one remote store that a test can be for itself.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use ferrotitan_data::{Error, Files, Source};

use crate::support::{build, byte_documents, documents, folder};

/// Serves one file, whole or by range, and claims another version of it after `versions` requests.
fn serve(content: Vec<u8>, versions: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            answer(stream.unwrap(), &content, if number < versions { "\"one\"" } else { "\"two\"" });
        }
    });
    format!("http://{address}")
}

fn answer(mut stream: TcpStream, content: &[u8], tag: &str) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let request = lines.next().unwrap().unwrap();
    let headers: Vec<String> = lines.map_while(|line| line.ok().filter(|line| !line.is_empty())).collect();
    let header = |name: &str| {
        headers.iter().find_map(|line| line.split_once(": ").filter(|(key, _)| key.eq_ignore_ascii_case(name)))
    };
    let common = format!("ETag: {tag}\r\nLast-Modified: Tue, 01 Jul 2025 00:00:00 GMT\r\nConnection: close\r\n");
    let (status, range, body) = if !request.contains("/a.jsonl") {
        ("404 Not Found", String::new(), &b""[..])
    } else if header("if-match").is_some_and(|(_, wanted)| wanted != tag) {
        ("412 Precondition Failed", String::new(), &b""[..])
    } else if let Some((_, range)) = header("range") {
        let (from, to) = range.trim_start_matches("bytes=").split_once('-').unwrap();
        let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
        let range = format!("Content-Range: bytes {from}-{to}/{}\r\n", content.len());
        ("206 Partial Content", range, &content[from..=to])
    } else {
        ("200 OK", String::new(), content)
    };
    write!(stream, "HTTP/1.1 {status}\r\n{common}{range}Content-Length: {}\r\n\r\n", body.len()).unwrap();
    if !request.starts_with("HEAD") {
        // The client may have gone.
        let _ = stream.write_all(body);
    }
}

fn source(address: &str) -> Source {
    Source::Files(Files::new([address]))
}

#[test]
fn a_file_is_read_in_ranges() {
    let texts: Vec<String> = (0..2000).map(|number| format!("{number} ").repeat(1000)).collect();
    let lines: String = texts.iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n").collect();
    assert!(lines.len() > 8 << 20, "more than one request");
    let folder = folder();
    let server = serve(lines.clone().into_bytes(), usize::MAX);
    let store = build(&source(&format!("{server}/data/a.jsonl")), folder.path()).unwrap();
    assert!(documents(&store) == byte_documents(&texts));
    assert!(matches!(build(&source(&format!("{server}/b.jsonl")), folder.path()), Err(Error::NotFound { .. })));

    // Replaced after the first range was read.
    let server = serve(lines.into_bytes(), 2);
    let error = build(&source(&format!("{server}/a.jsonl")), folder.path()).unwrap_err();
    assert!(matches!(error, Error::Io { action: "read", .. }), "{error:?}");
}
