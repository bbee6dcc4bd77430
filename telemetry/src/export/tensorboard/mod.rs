//! TensorBoard's event files: records of one event each, in a framing with checksums.

mod framing;
mod proto;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message as _;

use self::proto::{Event, SessionLog, Status, Summary, Value, What};
use crate::metrics::table::Sample;
use crate::{Error, Result};

/// An event file. Each step is in it as soon as it has been recorded.
#[derive(Debug)]
pub(crate) struct EventFile {
    path: PathBuf,
    file: File,
    begun: bool,
}

impl EventFile {
    /// Begins a file in this folder, which is made where it is missing. Files of earlier runs stay beside it, and
    /// TensorBoard reads them as one run.
    pub(crate) fn create(folder: &Path) -> Result<Self> {
        let wall_time = wall_time();
        let begin = || {
            fs::create_dir_all(folder)?;
            let (path, file) = create_new(folder, wall_time)?;
            let mut events = Self { path, file, begun: false };
            events.write(&[Event { wall_time, step: 0, what: Some(What::FileVersion("brain.Event:2".to_owned())) }])?;
            Ok(events)
        };
        begin().map_err(|source| Error::TensorBoard { path: folder.to_owned(), source })
    }

    /// Writes the values of a step.
    pub(crate) fn step(&mut self, step: u64, samples: &[Sample]) -> Result<()> {
        let wall_time = wall_time();
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let mut events = Vec::with_capacity(2);
        if !self.begun {
            // Says that a run begins or goes on here: what an earlier file has of this step and later ones was undone by
            // the resume, and TensorBoard leaves it out.
            let log = SessionLog { status: Status::Start.into() };
            events.push(Event { wall_time, step, what: Some(What::SessionLog(log)) });
        }
        let value =
            samples.iter().map(|sample| Value { tag: sample.tag(), simple_value: Some(sample.tag_value() as f32) });
        events.push(Event { wall_time, step, what: Some(What::Summary(Summary { value: value.collect() })) });
        self.write(&events).map_err(|source| Error::TensorBoard { path: self.path.clone(), source })?;
        self.begun = true;
        Ok(())
    }

    /// In one call, so that a reader seldom sees half a record; TensorBoard waits for the rest of one.
    fn write(&mut self, events: &[Event]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for event in events {
            framing::append(&mut bytes, &event.encode_to_vec());
        }
        self.file.write_all(&bytes)
    }
}

/// Seconds since 1970.
fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// A new file with a name as TensorFlow gives them. TensorBoard looks for `tfevents`, and reads the files of a folder in the
/// order of their names.
fn create_new(folder: &Path, wall_time: f64) -> io::Result<(PathBuf, File)> {
    let host = host();
    let process = std::process::id();
    let mut number = 0_u32;
    loop {
        let name = format!("events.out.tfevents.{:010}.{host}.{process}.{number}", wall_time as u64);
        let path = folder.join(name);
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < u32::MAX => number += 1,
            opened => return opened.map(|file| (path, file)),
        }
    }
}

/// The name of this machine, as far as it can stand in a file's name.
fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: String = name.trim().chars().filter(|c| c.is_ascii_alphanumeric() || "-._".contains(*c)).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::metrics::table::{COMM_BYTES, LOSS, MFU};

    /// The events of a file, through a reader that checks each checksum.
    fn read(path: &Path) -> Vec<Event> {
        let bytes = fs::read(path).unwrap();
        framing::records(&bytes).iter().map(|record| Event::decode(*record).unwrap()).collect()
    }

    #[test]
    fn steps_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(&folder.path().join("tb")).unwrap();
        file.step(7, &[LOSS.is(2.5), MFU.is(0.25)]).unwrap();
        file.step(8, &[LOSS.is(f64::NAN), COMM_BYTES.on("tp", (1_u64 << 30) as f64)]).unwrap();
        let events = read(&file.path);
        let steps: Vec<_> = events.iter().map(|event| event.step).collect();
        assert_eq!(steps, [0, 7, 7, 8]);
        assert_eq!(events[0].what, Some(What::FileVersion("brain.Event:2".to_owned())));
        assert_eq!(events[1].what, Some(What::SessionLog(SessionLog { status: Status::Start.into() })));
        let Some(What::Summary(first)) = &events[2].what else { panic!("{events:?}") };
        let values: Vec<_> = first.value.iter().map(|value| (value.tag.as_str(), value.simple_value)).collect();
        assert_eq!(values, [("loss_metrics/global_avg_loss", Some(2.5)), ("mfu(%)", Some(25.0))]);
        let Some(What::Summary(second)) = &events[3].what else { panic!("{events:?}") };
        assert!(second.value[0].simple_value.unwrap().is_nan());
        assert_eq!(
            (second.value[1].tag.as_str(), second.value[1].simple_value),
            ("comm_metrics/sent(GiB)/tp", Some(1.0))
        );
        assert!(events.iter().all(|event| event.wall_time > 1.7e9));
    }

    #[test]
    fn files_of_one_second_stand_side_by_side() {
        let folder = tempfile::tempdir().unwrap();
        let (first, _) = create_new(folder.path(), 12.0).unwrap();
        let (second, _) = create_new(folder.path(), 12.0).unwrap();
        assert!(first < second, "{first:?} {second:?}");
        assert!(first.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents.0000000012."));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = EventFile::create(&file.path().join("tb")).unwrap_err();
        assert!(error.to_string().contains(file.path().to_str().unwrap()), "{error}");
    }
}
