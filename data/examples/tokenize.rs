//! Tokenizes a corpus, and measures it: `tokenize CACHE [--hf TOKENIZER] (PATTERN... | --lock CARGO_LOCK)`.
#![allow(clippy::print_stdout)]

use std::ops::ControlFlow;
use std::time::Instant;

use ferrotitan_data::{BuildOptions, ByteTokenizer, CargoRegistry, Files, HfTokenizer, Source, TokenStore, Tokenizer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let cache = arguments.next().ok_or("which cache folder?")?;
    let mut tokenizer: Box<dyn Tokenizer> = Box::new(ByteTokenizer);
    let mut patterns = Vec::new();
    let mut lock = None;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--hf" => tokenizer = Box::new(HfTokenizer::from_file(arguments.next().ok_or("--hf which?")?)?),
            "--lock" => lock = Some(arguments.next().ok_or("--lock which?")?),
            _ => patterns.push(argument),
        }
    }
    let source = match lock {
        Some(lock) => Source::CargoRegistry(CargoRegistry::new(lock)),
        None => Source::Files(Files::new(patterns)),
    };
    for what in ["built or opened", "opened"] {
        let start = Instant::now();
        let mut progress = |_| ControlFlow::Continue(());
        let store = TokenStore::open_or_build(&source, &*tokenizer, &cache, BuildOptions::default(), &mut progress)?;
        let seconds = start.elapsed().as_secs_f64();
        let megabytes = store.text_bytes() as f64 / 1e6;
        println!("{what} in {seconds:.3} s ({:.0} MB/s of text)", megabytes / seconds);
        println!("  {megabytes:.1} MB, {} documents, {} tokens", store.documents(), store.tokens());
        println!("  {} files skipped, {}", store.skipped(), store.folder().display());
    }
    Ok(())
}
