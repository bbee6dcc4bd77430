//! What the units of one rank share: the order in which they run, what is gathered ahead, and the reductions under way.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrotitan_comm::{DeviceMesh, Wire};
use ferrotitan_mesh::{Dim, Mesh, Parts, View};
use ferrotitan_nn::Parameter;

use crate::log::{Log, What};
use crate::reduce::Reduction;
use crate::unit::{Groups, Member, Status, Unit};
use crate::{Error, Options, Reshard, Result};

/// How many units may be gathered at a time before one more is gathered ahead of its use.
const GATHERED: usize = 2;

/// How many units a forward pass may run before it is forgotten, since no backward will come.
const LONGEST: usize = 1 << 16;

/// One model's units on one rank.
#[derive(Debug)]
pub(crate) struct Engine {
    options: Options,
    groups: Groups,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) units: Vec<Unit>,
    pub(crate) log: Log,
    pub(crate) requires_reduction: bool,
    /// The units in the order in which the last forward pass with a backward ran them; at first, that of their making.
    order: Vec<usize>,
    /// The units that the forward pass under way has run.
    pass: Vec<usize>,
    /// Where in the order the backward pass under way has come to; none in a forward pass.
    backward: Option<usize>,
    reductions: VecDeque<Reduction>,
}

/// A parameter, the axis to divide it along, and its form on the way.
#[derive(Debug)]
pub(crate) struct Described {
    pub(crate) parameter: Parameter,
    pub(crate) axis: usize,
    pub(crate) wire: Option<Arc<dyn Wire>>,
}

/// A unit as one of its layers uses it.
#[derive(Debug, Clone)]
pub(crate) struct Use {
    pub(crate) unit: usize,
    /// Units that own further parameters of the layer.
    pub(crate) borrowed: Arc<[usize]>,
    /// Whether the layer is the unit's last, with which a forward through the unit ends.
    pub(crate) last: bool,
}

impl Engine {
    pub(crate) fn new(mesh: DeviceMesh, options: Options) -> Result<Self> {
        let block = match options.reshard_after_forward {
            Reshard::Ranks(ranks) => Some(ranks),
            _ => None,
        };
        let state = State {
            units: Vec::new(),
            log: Log::default(),
            requires_reduction: true,
            order: Vec::new(),
            pass: Vec::new(),
            backward: None,
            reductions: VecDeque::new(),
        };
        Ok(Self { options, groups: Groups::new(mesh, block)?, state: Mutex::new(state) })
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // After a panic in here the rank is lost anyway, and whoever waits for it is told.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a unit of parameters. Those that belong to a unit already are
    /// left to it. Gives the unit's number, if anything was left, and the other units.
    pub(crate) fn add(&self, name: &str, parameters: Vec<Described>) -> Result<(Option<usize>, Vec<usize>)> {
        let mut state = self.state();
        let (mut members, mut owners): (Vec<Member>, Vec<usize>) = Default::default();
        for Described { parameter, axis, wire } in parameters {
            let is_known = |members: &[Member]| members.iter().any(|member| member.parameter.is(&parameter));
            if let Some(owner) = state.units.iter().position(|unit| is_known(&unit.members)) {
                owners.push(owner);
                continue;
            }
            if is_known(&members) {
                continue;
            }
            let name = || parameter.name().to_owned();
            if parameter.local().is_ok() {
                return Err(Error::Materialized { name: name() });
            }
            let layout = parameter.layout().shard(View::FSDP, axis, Parts::Even);
            parameter.set_layout(layout.map_err(|source| Error::Layout { name: name(), source })?);
            members.push(Member::new(parameter, wire, &self.groups.mesh)?);
        }
        owners.sort_unstable();
        owners.dedup();
        owners.iter().for_each(|&owner| state.units[owner].shared = true);
        if members.is_empty() {
            return Ok((None, owners));
        }
        state.units.push(Unit::new(name.to_owned(), members));
        let unit = state.units.len() - 1;
        state.order.push(unit);
        Ok((Some(unit), owners))
    }

    /// Before a layer's forward: its units are gathered, and the next one's gather is under way.
    pub(crate) fn before_forward(&self, used: &Use, is_tracked: bool) -> Result<()> {
        let mut state = self.state();
        let state = &mut *state;
        if is_tracked && state.pass.last() != Some(&used.unit) {
            // Passes without a backward between them (a pipeline's microbatches) count as one.
            if state.backward.take().is_some() || state.pass.len() == LONGEST {
                state.pass.clear();
            }
            state.pass.push(used.unit);
        }
        for unit in used.units() {
            state.gather(unit, &self.groups)?;
        }
        let expected = state.pass.len().checked_sub(1).filter(|&place| state.order.get(place) == Some(&used.unit));
        let place = expected.or_else(|| state.order.iter().position(|&unit| unit == used.unit));
        if let Some(&next) = place.and_then(|place| state.order.get(place + 1)) {
            state.gather_ahead(next, self)?;
        }
        state.log.note(used.unit, What::Forward);
        Ok(())
    }

    /// After a layer's forward: its units are released, unless a backward will come that finds them sooner so.
    pub(crate) fn after_forward(&self, used: &Use, has_backward: bool) -> Result<()> {
        let mut state = self.state();
        if has_backward {
            used.units().for_each(|unit| state.units[unit].touched = true);
            state.units[used.unit].forwards += usize::from(used.last);
        }
        let is_last = state.order.last() == Some(&used.unit) && self.options.reshard_after_forward != Reshard::Always;
        for unit in used.units().filter(|&unit| used.last || unit != used.unit) {
            let awaited = has_backward || state.units[unit].forwards > 0;
            if !(awaited && (is_last || self.keeps())) {
                state.release(unit, !awaited)?;
            }
        }
        Ok(())
    }

    /// Before a layer's backward: its units are gathered, and the gather of the one before is under way.
    pub(crate) fn before_backward(&self, used: &Use) -> Result<()> {
        let mut state = self.state();
        let state = &mut *state;
        if state.backward.is_none() && !state.pass.is_empty() {
            state.order = std::mem::take(&mut state.pass);
        }
        for unit in used.units() {
            state.gather(unit, &self.groups)?;
        }
        let cursor = state.backward.unwrap_or(state.order.len());
        let find = |order: &[usize]| order.iter().rposition(|&unit| unit == used.unit);
        // The layers of one unit find it where the last of them has moved the cursor to; another pass starts anew.
        let place = find(&state.order[..(cursor + 1).min(state.order.len())]).or_else(|| find(&state.order));
        state.backward = Some(place.unwrap_or(cursor));
        if let Some(place) = place
            && let Some(&previous) = state.order[..place].last()
            && state.units[previous].forwards > 0
        {
            state.gather_ahead(previous, self)?;
        }
        state.log.note(used.unit, What::Backward);
        Ok(())
    }

    /// After a unit's backward: its parameters are released, and the reduction of its gradients is under way, that of
    /// the unit before it being through or one stage further.
    pub(crate) fn after_backward(&self, used: &Use) -> Result<()> {
        let mut state = self.state();
        let unit = &mut state.units[used.unit];
        unit.forwards = unit.forwards.saturating_sub(1);
        let through = unit.forwards == 0;
        let shared = unit.shared;
        if through || !self.keeps() {
            state.release(used.unit, through)?;
        }
        for &unit in used.borrowed.iter().filter(|_| !self.keeps()) {
            state.release(unit, false)?;
        }
        // What two units use is reduced once, at the end.
        self.settle(&mut state, used.unit, through && !shared)
    }

    /// After a backward pass: what is still gathered is released, and, where gradients are to be reduced, all have been.
    pub(crate) fn finish_backward(&self) -> Result<()> {
        let mut state = self.state();
        state.backward = None;
        state.pass.clear();
        for unit in (0..state.units.len()).rev() {
            state.units[unit].forwards = 0;
            state.release(unit, true)?;
            if state.units[unit].touched {
                self.settle(&mut state, unit, true)?;
            }
        }
        while !state.reductions.is_empty() {
            state.advance(&self.groups)?;
        }
        Ok(())
    }

    /// Starts the reduction of a unit's gradients if they are complete and wanted; else puts them by.
    fn settle(&self, state: &mut State, unit: usize, is_complete: bool) -> Result<()> {
        if is_complete && state.requires_reduction {
            state.advance(&self.groups)?;
            state.start_reduction(unit, self)
        } else {
            let kind = self.reduce_kind(&state.units[unit])?;
            state.units[unit].accumulate(kind)
        }
    }

    /// Reduces what a unit has accumulated, and waits for it.
    pub(crate) fn reduce(&self, unit: usize) -> Result<()> {
        let mut state = self.state();
        if state.units[unit].touched {
            state.start_reduction(unit, self)?;
        }
        while !state.reductions.is_empty() {
            state.advance(&self.groups)?;
        }
        Ok(())
    }

    /// Starts a unit's gather; it stays gathered until it is unpinned.
    pub(crate) fn pin(&self, unit: usize) -> Result<()> {
        let mut state = self.state();
        state.units[unit].prepare(&self.groups)?;
        state.units[unit].pinned = true;
        state.start_gather(unit, &self.groups)
    }

    /// Releases a unit, pinned or not.
    pub(crate) fn unpin(&self, unit: usize) -> Result<()> {
        let mut state = self.state();
        state.units[unit].pinned = false;
        state.release(unit, true)
    }

    fn reduce_kind(&self, unit: &Unit) -> Result<tch::Kind> {
        self.options.reduce.map_or_else(|| unit.reduce_kind(), Ok)
    }

    /// Whether units stay gathered between forward and backward.
    fn keeps(&self) -> bool {
        match self.options.reshard_after_forward {
            Reshard::Never => true,
            Reshard::Default => self.groups.mesh.degrees().get(Dim::Pp) > 1,
            Reshard::Always => false,
            Reshard::Ranks(ranks) => ranks == 1,
        }
    }
}

impl Use {
    fn units(&self) -> impl Iterator<Item = usize> + '_ {
        [self.unit].into_iter().chain(self.borrowed.iter().copied())
    }
}

impl State {
    /// Gathers a unit, unless it is.
    fn gather(&mut self, unit: usize, groups: &Groups) -> Result<()> {
        self.units[unit].prepare(groups)?;
        self.start_gather(unit, groups)?;
        if matches!(self.units[unit].status, Status::Flying(_)) {
            self.units[unit].finish_gather(groups)?;
            self.log.note(unit, What::Gathered);
        }
        Ok(())
    }

    /// Starts the gather of a prepared unit, unless there is nothing to gather.
    fn start_gather(&mut self, unit: usize, groups: &Groups) -> Result<()> {
        if matches!(self.units[unit].status, Status::Sharded) && !self.units[unit].is_whole() {
            self.units[unit].start_gather(groups)?;
            self.log.note(unit, What::GatherStarted);
        }
        Ok(())
    }

    /// Starts the gather of the unit that will probably be next, if there is room for it and none is under way.
    fn gather_ahead(&mut self, unit: usize, engine: &Engine) -> Result<()> {
        let flying = self.units.iter().any(|unit| matches!(unit.status, Status::Flying(_)) && !unit.pinned);
        let is_counted = |unit: &&Unit| !unit.pinned && matches!(unit.status, Status::Gathered);
        let room = engine.keeps() || self.units.iter().filter(is_counted).count() < GATHERED;
        if !flying && room {
            self.units[unit].prepare(&engine.groups)?;
            self.start_gather(unit, &engine.groups)?;
        }
        Ok(())
    }

    /// Gives a unit's memory back, unless it is pinned.
    fn release(&mut self, unit: usize, for_good: bool) -> Result<()> {
        let state = &mut self.units[unit];
        if state.pinned {
            return Ok(());
        }
        if for_good {
            state.forget_stretch();
        }
        match std::mem::replace(&mut state.status, Status::Sharded) {
            Status::Sharded => return Ok(()),
            Status::Flying(pending) => drop(pending.wait().map_err(state.comm_error())?),
            Status::Gathered => {}
        }
        state.release()?;
        self.log.note(unit, What::Released);
        Ok(())
    }

    /// Moves every reduction one stage on, oldest first.
    fn advance(&mut self, groups: &Groups) -> Result<()> {
        for _ in 0..self.reductions.len() {
            let Some(reduction) = self.reductions.pop_front() else { break };
            let unit = reduction.unit;
            match reduction.advance(&self.units[unit], groups)? {
                Some(rest) => self.reductions.push_back(rest),
                None => self.log.note(unit, What::Reduced),
            }
        }
        Ok(())
    }

    fn start_reduction(&mut self, unit: usize, engine: &Engine) -> Result<()> {
        if !self.units[unit].is_trainable() {
            return Ok(());
        }
        let kind = engine.reduce_kind(&self.units[unit])?;
        let started = Reduction::start(&mut self.units[unit], unit, kind, &engine.groups)?;
        if let Some(reduction) = started {
            self.log.note(unit, What::ReduceStarted);
            self.reductions.push_back(reduction);
        }
        Ok(())
    }
}
