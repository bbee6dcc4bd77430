//! The steps that are in a store, and what they hold.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use bytes::Bytes;
use ferrotitan_mesh::{Region, Transfer};

use crate::manifest::{CHUNK, File, MANIFEST, Manifest, Part, Presence, presence};
use crate::store::Pending;
use crate::{Error, Result, Source, Store, TensorInfo};

/// The most bytes of one request, a multiple of [`CHUNK`].
const REQUEST: u64 = 8 * CHUNK;
/// Requests under way at once for one region.
const CONCURRENT: usize = 4;

/// Which step is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    /// The one with the largest number.
    Latest,
    /// This one.
    Step(u64),
}

/// The name of a step's folder.
pub(crate) fn folder(step: u64) -> String {
    format!("step-{step}")
}

/// The steps that have a folder, the latest first, whether they exist or are torn.
pub(crate) fn folders(store: &Store) -> Result<Vec<u64>> {
    let step = |name: &String| name.strip_prefix("step-")?.parse().ok().filter(|step| folder(*step) == *name);
    let mut steps: Vec<u64> = store.folders("")?.iter().filter_map(step).collect();
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}

/// The steps that exist, the earliest first. A folder whose manifest is missing or was not written to its end is none.
///
/// # Errors
/// The store's.
pub fn steps(store: &Store) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    for step in folders(store)?.into_iter().rev() {
        if presence(&store.below(&folder(step)))? == Presence::There {
            found.push(step);
        }
    }
    Ok(found)
}

/// A step in a store, read as a [`Source`].
///
/// Its manifest was checked as a whole when it was opened; the bytes of tensors are checked when they are read.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder of the step.
    store: Store,
    step: u64,
    state: serde_json::Value,
    tensors: BTreeMap<String, TensorInfo>,
    parts: BTreeMap<String, Vec<Part>>,
    files: BTreeMap<String, File>,
}

impl Checkpoint {
    /// Opens a step of the checkpoints in `store`.
    ///
    /// The latest step is the latest that exists. Should its manifest be damaged, that is an error, and not a reason to
    /// go on from an older step unasked.
    ///
    /// # Errors
    /// [`Error::NoStep`]; [`Error::Damaged`]; the store's.
    pub fn open(store: &Store, which: Which) -> Result<Self> {
        let step = match which {
            Which::Latest => latest(store)?,
            Which::Step(step) => (presence(&store.below(&folder(step)))? == Presence::There).then_some(step),
        };
        let Some(step) = step else {
            let steps = steps(store)?;
            let which = match which {
                Which::Latest => "checkpoint".to_owned(),
                Which::Step(step) => format!("checkpoint of step {step}"),
            };
            let found = match &*steps {
                [] => "no step was saved there to its end".to_owned(),
                steps => format!("there are steps {steps:?}"),
            };
            return Err(Error::NoStep { address: store.to_string(), which, found });
        };
        let store = store.below(&folder(step));
        let manifest = Manifest::read(&store, MANIFEST, step)?;
        if let Err((tensor, reason)) = manifest.check() {
            return Err(Error::Damaged { object: store.name(MANIFEST), reason: format!("tensor {tensor}: {reason}") });
        }
        let Manifest { state, tensors, files, .. } = manifest;
        let (tensors, parts) =
            tensors.into_iter().map(|(name, entry)| ((name.clone(), entry.info()), (name, entry.parts))).unzip();
        Ok(Checkpoint { store, step, state, tensors, parts, files })
    }

    /// The step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// What was saved beside the tensors.
    pub fn state(&self) -> &serde_json::Value {
        &self.state
    }

    /// The files that hold the tensors, by their paths in the folder of the step.
    pub fn files(&self) -> &BTreeMap<String, File> {
        &self.files
    }

    /// The parts of a tensor; none when there is no such tensor, or when it has no element.
    pub fn parts(&self, name: &str) -> &[Part] {
        self.parts.get(name).map_or(&[], Vec::as_slice)
    }

    /// Reads all bytes of all files and checks them; calls `read` with how many more were read, again and again.
    ///
    /// # Errors
    /// That of the first tensor, or header of a file, that is not as it was written.
    pub fn verify(&self, mut read: impl FnMut(u64)) -> Result<()> {
        for (path, file) in &self.files {
            let damaged = |reason: &str| Error::Damaged { object: self.store.name(path), reason: reason.to_owned() };
            if self.store.size(path)? != file.bytes || file.header_bytes > file.bytes {
                return Err(damaged("it has another length than when it was written"));
            }
            let header = self.store.get_range(path, 0..file.header_bytes)?;
            if crc32c::crc32c(&header) != file.header_crc32c {
                return Err(damaged("its header has another checksum than when it was written"));
            }
            read(file.header_bytes);
        }
        for (name, parts) in &self.parts {
            for part in parts {
                let (start, end) = part.bytes;
                let mut windows = (start..end).step_by(REQUEST as usize).map(|at| at..end.min(at + REQUEST));
                self.fetch(name, part, &mut windows, |window, _| read(window.end - window.start))?;
            }
        }
        Ok(())
    }

    /// Reads windows of a part, several at a time, checks them, and gives them to `take` in order. A window begins at a
    /// multiple of [`CHUNK`] from the start of the part, and ends at one or at the end of the part.
    fn fetch(
        &self,
        name: &str,
        part: &Part,
        windows: &mut dyn Iterator<Item = Range<u64>>,
        mut take: impl FnMut(Range<u64>, &[u8]),
    ) -> Result<()> {
        let mut flying: VecDeque<(Range<u64>, Pending<Bytes>)> = VecDeque::new();
        loop {
            while flying.len() < CONCURRENT
                && let Some(window) = windows.next()
            {
                let request = self.store.get_range_start(&part.file, window.clone());
                flying.push_back((window, request.map_err(Error::of_tensor(name))?));
            }
            let Some((window, request)) = flying.pop_front() else { return Ok(()) };
            let bytes = request.wait().and_then(|bytes| self.store.whole(&part.file, &window, bytes));
            let bytes = bytes.map_err(Error::of_tensor(name))?;
            self.check_sums(name, part, &window, &bytes)?;
            take(window, &bytes);
        }
    }

    fn check_sums(&self, name: &str, part: &Part, window: &Range<u64>, bytes: &[u8]) -> Result<()> {
        let first = (window.start - part.bytes.0) / CHUNK;
        let sums = part.crc32c.get(first as usize..).unwrap_or(&[]);
        for (index, chunk) in bytes.chunks(CHUNK as usize).enumerate() {
            if sums.get(index) != Some(&crc32c::crc32c(chunk)) {
                let start = window.start + index as u64 * CHUNK;
                let (end, object) = (start + chunk.len() as u64, self.store.name(&part.file));
                return Err(Error::Checksum { tensor: name.to_owned(), object, start, end });
            }
        }
        Ok(())
    }
}

impl Source for Checkpoint {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let element = self.check(name, region, out)?.dtype.size();
        for part in self.parts(name) {
            let from = part.region();
            let Some(common) = from.intersect(region) else { continue };
            let transfer = Transfer { from_rank: 0, region: common, from, into: region.clone() };
            let runs = || {
                transfer.runs().map(|run| {
                    let (source, length) = ((run.source * element) as u64, run.length * element);
                    (source..source + length as u64, run.target * element)
                })
            };
            let mut windows = Windows::new(part, runs().map(|(source, _)| source));
            // The runs that lie in a window, the first of which may have begun in the window before.
            let mut left = runs();
            let mut run = left.next();
            self.fetch(name, part, &mut windows, |window, bytes| {
                let base = window.start - part.bytes.0;
                let end = window.end - part.bytes.0;
                while let Some((source, target)) = &mut run {
                    if source.start >= end {
                        break;
                    }
                    let stop = source.end.min(end);
                    let found = &bytes[(source.start - base) as usize..(stop - base) as usize];
                    out[*target..*target + found.len()].copy_from_slice(found);
                    if stop < source.end {
                        *target += found.len();
                        source.start = stop;
                        break;
                    }
                    run = left.next();
                }
            })?;
        }
        Ok(())
    }
}

/// The windows of a part that runs of bytes touch: whole chunks, those without a gap together, so far as one request goes.
struct Windows<'a, I: Iterator<Item = Range<u64>>> {
    part: &'a Part,
    /// Runs, relative to the part, in order.
    runs: I,
    /// Chunks that are still to be read.
    chunks: Range<u64>,
}

impl<'a, I: Iterator<Item = Range<u64>>> Windows<'a, I> {
    fn new(part: &'a Part, runs: I) -> Self {
        Windows { part, runs, chunks: 0..0 }
    }
}

impl<I: Iterator<Item = Range<u64>>> Iterator for Windows<'_, I> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        const LONGEST: u64 = REQUEST / CHUNK;
        // Gathers runs until there is a gap, or enough for a request.
        let mut next = None;
        while self.chunks.end - self.chunks.start < LONGEST {
            let Some(run) = self.runs.next() else { break };
            let touched = run.start / CHUNK..run.end.div_ceil(CHUNK);
            if self.chunks.is_empty() {
                self.chunks = touched.start.max(self.chunks.end)..touched.end.max(self.chunks.end);
            } else if touched.start <= self.chunks.end {
                self.chunks.end = self.chunks.end.max(touched.end);
            } else {
                next = Some(touched);
                break;
            }
        }
        if self.chunks.is_empty() {
            return None;
        }
        let now = self.chunks.start..self.chunks.end.min(self.chunks.start + LONGEST);
        self.chunks = match next {
            Some(next) => next,
            None => now.end..self.chunks.end,
        };
        let (start, end) = self.part.bytes;
        Some(start + now.start * CHUNK..end.min(start + now.end * CHUNK))
    }
}

/// The latest step that exists.
fn latest(store: &Store) -> Result<Option<u64>> {
    for step in folders(store)? {
        match presence(&store.below(&folder(step)))? {
            Presence::There => return Ok(Some(step)),
            Presence::Torn => tracing::warn!(step, %store, "ignoring a step that was not saved to its end"),
            Presence::Absent => {}
        }
    }
    Ok(None)
}
