//! One collective among rank threads: who has entered, which tasks are done, what came of them.

use tch::Tensor;

use super::memory::{self, Part};
use crate::Call;

#[derive(Debug)]
pub(super) struct Meeting {
    /// By group rank.
    parts: Vec<Option<Part>>,
    entered: usize,
    claimed: Vec<bool>,
    done: usize,
    /// By group rank, where a task made the rank's result.
    made: Vec<Option<Tensor>>,
    /// libtorch's words, if it refused a task.
    refused: Option<String>,
    left: usize,
}

impl Meeting {
    pub(super) fn new(call: &Call, size: usize) -> Self {
        let tasks = memory::tasks(call, size);
        Meeting {
            parts: (0..size).map(|_| None).collect(),
            entered: 0,
            claimed: vec![false; tasks],
            done: 0,
            made: (0..tasks).map(|_| None).collect(),
            refused: None,
            left: 0,
        }
    }

    /// A rank that has entered with something that the rank at `index` does not agree with, and what that was.
    pub(super) fn conflict(&self, index: usize, call: &Call) -> Option<(usize, Call)> {
        let mut entered = self.parts.iter().enumerate().filter_map(|(other, part)| Some((other, &part.as_ref()?.call)));
        let found = entered.find(|&(other, theirs)| other == index || !call.agrees(index, theirs, other));
        found.map(|(other, theirs)| (other, theirs.clone()))
    }

    pub(super) fn enter(&mut self, index: usize, part: Part) {
        self.parts[index] = Some(part);
        self.entered += 1;
    }

    /// Notes that one rank has its result, or wants none; gives whether it was the last.
    pub(super) fn leave(&mut self) -> bool {
        self.left += 1;
        self.left == self.parts.len()
    }

    /// Whether all have entered.
    pub(super) fn is_complete(&self) -> bool {
        self.entered == self.parts.len()
    }

    /// Whether all tasks are done.
    pub(super) fn is_over(&self) -> bool {
        self.is_complete() && self.done == self.claimed.len()
    }

    /// The group ranks that have not entered.
    pub(super) fn missing(&self) -> Vec<usize> {
        (0..self.parts.len()).filter(|&index| self.parts[index].is_none()).collect()
    }

    /// A task of a complete meeting that nobody has claimed, `own` if it is one, and what it needs.
    pub(super) fn claim(&mut self, own: usize) -> Option<(usize, Vec<Part>)> {
        if !self.is_complete() {
            return None;
        }
        let tasks = self.claimed.len();
        let task = (own..tasks).chain(0..own.min(tasks)).find(|&task| !self.claimed[task])?;
        self.claimed[task] = true;
        Some((task, self.parts.iter().flatten().map(Part::share).collect()))
    }

    /// Notes what came of a task.
    pub(super) fn complete(&mut self, task: usize, made: Result<Option<Tensor>, String>) {
        match made {
            Ok(made) => self.made[task] = made,
            Err(refused) => {
                // Nobody need claim the rest.
                self.done += self.claimed.iter().filter(|claimed| !**claimed).count();
                self.claimed.fill(true);
                self.refused = Some(refused);
            }
        }
        self.done += 1;
        if self.is_over() {
            self.parts.iter_mut().flatten().for_each(Part::release_input);
        }
    }

    /// The result of the rank at `index`, once the meeting is over.
    pub(super) fn take(&mut self, index: usize) -> Option<Result<Tensor, String>> {
        if !self.is_over() {
            return None;
        }
        if let Some(refused) = &self.refused {
            return Some(Err(refused.clone()));
        }
        let made = self.made.get_mut(index).and_then(Option::take);
        let written = self.parts[index].as_mut().and_then(Part::take_output);
        Some(Ok(made.or(written).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tch::{Device, Kind};

    use super::*;
    use crate::{Buffers, Collective, Cut};

    fn gather(length: i64) -> Part {
        let input = Tensor::full([length], length, (Kind::Int64, Device::Cpu));
        let what = Collective::AllGather { parts: Cut { axis: 0, sizes: vec![1, 2] } };
        let call = Call { what, shape: vec![length], kind: Kind::Int64 };
        Part::new(call, Buffers { input: Some(input), ..Buffers::default() }).unwrap()
    }

    #[test]
    fn anyone_may_do_all_the_work_once_all_have_entered() {
        let mut meeting = Meeting::new(&gather(1).call, 2);
        meeting.enter(1, gather(2));
        assert!(meeting.claim(1).is_none() && meeting.take(1).is_none());
        assert_eq!(meeting.missing(), [0]);
        assert!(meeting.conflict(0, &gather(2).call).is_none(), "a gather's own axis may differ");
        meeting.enter(0, gather(1));
        for expected in [1, 0] {
            let (task, parts) = meeting.claim(1).unwrap();
            assert_eq!(task, expected);
            meeting.complete(task, memory::perform(&parts, task).map_err(|error| error.to_string()));
        }
        assert!(meeting.claim(0).is_none());
        for index in 0..2 {
            assert_eq!(meeting.take(index).unwrap().unwrap(), Tensor::from_slice(&[1_i64, 2, 2]));
        }
        assert!(!meeting.leave() && meeting.leave());
    }

    #[test]
    fn a_refused_task_ends_the_meeting_for_all() {
        let mut meeting = Meeting::new(&gather(1).call, 2);
        meeting.enter(0, gather(1));
        meeting.enter(1, gather(2));
        let (task, _) = meeting.claim(0).unwrap();
        meeting.complete(task, Err("no memory".to_owned()));
        assert!(meeting.claim(1).is_none() && meeting.is_over());
        assert!((0..2).all(|index| meeting.take(index).unwrap().unwrap_err() == "no memory"));
    }
}
