//! Saves and loads of one rank on a local disk, against a plain copy of the same bytes, in turns.
//!
//! `cargo bench -p ferrotitan-checkpoint -- [MEGABYTES] [ROUNDS] [FOLDER]`, by default 1000, 5 and the system's temporary
//! folder. Reads come from the page cache on both sides; writes are on the disk (`fsync`) on both sides.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::error::Error;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use ferrotitan_checkpoint::comm::DeviceMesh;
use ferrotitan_checkpoint::mesh::Layout;
use ferrotitan_checkpoint::{Checkpoint, Item, LoadOptions, Mode, SaveOptions, Saver, Source, Store, Which, load};
use ferrotitan_ext::memory;
use tch::{Device, Kind, Tensor};

/// The number of tensors.
const TENSORS: usize = 40;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let number = |index: usize, or: usize| args.get(index).map_or(Ok(or), |arg| arg.parse());
    let (megabytes, rounds) = (number(0, 1000)?, number(1, 5)?);
    let folder = match args.get(2) {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let elements = (megabytes * 1_000_000 / 4 / TENSORS) as i64;
    let random = |_| Tensor::rand([elements / 1000, 1000], (Kind::Float, Device::Cpu));
    let tensors: Vec<Tensor> = (0..TENSORS).map(random).collect();
    let bytes = tensors.iter().map(|tensor| tensor.numel() * 4).sum::<usize>();
    println!("{:.0} MB in {TENSORS} tensors, {rounds} rounds, in {}", bytes as f64 / 1e6, folder.path().display());

    let mut bench = Bench { bytes, rows: Vec::new() };
    let mesh = DeviceMesh::single(Device::Cpu);
    let saver = |mode, name: &str| -> Result<Saver, Box<dyn Error>> {
        let store = Store::open(folder.path().join(name).to_str().ok_or("no UTF-8")?)?;
        let options = SaveOptions { mode, keep_latest_k: 1, ..SaveOptions::default() };
        Ok(Saver::new(store, mesh.clone(), options))
    };
    let (mut in_turn, mut behind) = (saver(Mode::Sync, "sync")?, saver(Mode::Async, "async")?);
    // First of all, since memory that was used before does not show.
    println!("peak memory beyond what was there, as a share of the tensors:");
    peak(bytes, "save", || Ok(in_turn.save(1000, items(&tensors), serde_json::Value::Null).map(drop)?))?;
    let checkpoint = Checkpoint::open(&Store::open(&folder.path().join("sync").to_string_lossy())?, Which::Latest)?;
    peak(bytes, "load", || Ok(load(&checkpoint, items(&tensors), &mesh, &LoadOptions::default()).map(drop)?))?;
    peak(bytes, "async save, staging included", || {
        behind.save(1000, items(&tensors), serde_json::Value::Null)?;
        Ok(behind.wait().map(drop)?)
    })?;

    // One buffer for the plain reads and writes, which is no part of what is measured.
    let mut plain: Vec<u8> =
        tensors.iter().flat_map(|tensor| ferrotitan_ext::storage::to_bytes(tensor).unwrap()).collect();
    let copy = folder.path().join("plain");
    for round in 0..rounds as u64 {
        bench.time("write plainly", || write(&copy, &plain))?;
        bench.time("save", || Ok(in_turn.save(round, items(&tensors), serde_json::Value::Null).map(drop)?))?;
        let begun = Instant::now();
        behind.save(round, items(&tensors), serde_json::Value::Null)?;
        bench.note("stall of an async save", begun.elapsed());
        let done = behind.wait()?.ok_or("no save")?;
        bench.note("  writing it behind", done.write + done.commit);

        bench.time("read plainly", || Ok(File::open(&copy)?.read_exact(&mut plain)?))?;
        let checkpoint =
            Checkpoint::open(&Store::open(&folder.path().join("sync").to_string_lossy())?, Which::Step(round))?;
        bench.time("load", || {
            load(&checkpoint, items(&tensors), &mesh, &LoadOptions::default()).map(drop).map_err(Into::into)
        })?;
        assert_eq!(checkpoint.tensors().len(), TENSORS);
        let other = folder.path().join("copy");
        bench.time("copy file to file", || {
            fs::copy(&copy, &other)?;
            Ok(File::open(&other)?.sync_all()?)
        })?;
    }
    bench.report();

    Ok(())
}

fn items(tensors: &[Tensor]) -> impl Iterator<Item = Item> {
    tensors.iter().enumerate().map(|(index, tensor)| {
        let shape: Vec<usize> = tensor.size().iter().map(|&length| length as usize).collect();
        Item::new(format!("layers.{index}.weight"), Layout::replicated(&shape), tensor.shallow_clone())
    })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let mut file = File::create(path)?;
    bytes.chunks(8 << 20).try_for_each(|chunk| file.write_all(chunk))?;
    Ok(file.sync_all()?)
}

/// The resident memory at its peak, over what it was before; the system counts anew from the start of each.
fn peak(bytes: usize, what: &str, body: impl FnOnce() -> Result<(), Box<dyn Error>>) -> Result<(), Box<dyn Error>> {
    fs::write("/proc/self/clear_refs", "5")?;
    let before = memory::rss().ok_or("no /proc")?;
    body()?;
    let extra = memory::peak_rss().ok_or("no /proc")?.saturating_sub(before);
    println!("  {what:<32} {:>7.1} MB  {:.3}", extra as f64 / 1e6, extra as f64 / bytes as f64);
    Ok(())
}

struct Bench {
    bytes: usize,
    rows: Vec<(&'static str, Vec<Duration>)>,
}

impl Bench {
    fn time(
        &mut self,
        what: &'static str,
        body: impl FnOnce() -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let begun = Instant::now();
        body()?;
        self.note(what, begun.elapsed());
        Ok(())
    }

    fn note(&mut self, what: &'static str, took: Duration) {
        match self.rows.iter_mut().find(|(name, _)| *name == what) {
            Some((_, times)) => times.push(took),
            None => self.rows.push((what, vec![took])),
        }
    }

    fn median(&self, what: &str) -> f64 {
        let (_, times) = self.rows.iter().find(|(name, _)| *name == what).unwrap();
        let mut times = times.clone();
        times.sort();
        times[times.len() / 2].as_secs_f64()
    }

    fn report(&self) {
        for (what, times) in &self.rows {
            let seconds = self.median(what);
            let (least, most) = (times.iter().min().unwrap(), times.iter().max().unwrap());
            let rate = self.bytes as f64 / seconds / 1e6;
            println!("  {what:<24} {seconds:>7.3} s ({least:.3?} to {most:.3?})  {rate:>6.0} MB/s");
        }
        let ratio = |a, b| self.median(a) / self.median(b);
        println!("save against a plain write:   {:.2} of its throughput", ratio("write plainly", "save"));
        println!("save against a file copy:     {:.2} of its throughput", ratio("copy file to file", "save"));
        println!("load against a plain read:    {:.2} of its throughput", ratio("read plainly", "load"));
        println!("load against a file copy:     {:.2} of its throughput", ratio("copy file to file", "load"));
        println!("stall of async against sync:  {:.3}", ratio("stall of an async save", "save"));
    }
}
