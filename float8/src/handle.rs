//! What a training loop holds of a model whose products are in eight bits.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferrotitan_comm::{Group, ReduceOp, Wire};
use ferrotitan_nn::Parameter;
use tch::{Device, Kind, Tensor};

use crate::error::Context as _;
use crate::scale::{amax, scale_for};
use crate::site::{Groups, Site};
use crate::wire::Float8Wire;
use crate::{Error, Format, Operand, Result};

/// The projections of one model on one rank that compute in eight bits. Clones are the same projections.
///
/// Every rank of a stage calls the same methods in the same order, as with the collectives that they lead to.
#[derive(Clone, Debug)]
pub struct Handle {
    sites: Arc<[Arc<Site>]>,
    left_out: Arc<[(String, String)]>,
    weight: Group,
    stage: Group,
    sends: bool,
    ahead: bool,
}

impl Handle {
    pub(crate) fn new(
        sites: Vec<Arc<Site>>,
        left_out: Vec<(String, String)>,
        groups: &Groups,
        sends: bool,
        ahead: bool,
    ) -> Self {
        let (weight, stage) = (groups.weight.clone(), groups.stage.clone());
        Self { sites: sites.into(), left_out: left_out.into(), weight, stage, sends, ahead }
    }

    /// The names of the weights whose products are in eight bits.
    pub fn converted(&self) -> impl Iterator<Item = &str> {
        self.sites.iter().map(|site| site.weight.name())
    }

    /// The names of the other projections' weights, and why they are not converted.
    #[must_use]
    pub fn left_out(&self) -> &[(String, String)] {
        &self.left_out
    }

    /// For `Fsdp::with_wires`: the form in which each parameter travels, where that is Float8.
    ///
    /// None does unless `enable_fsdp_float8_all_gather` is on.
    pub fn wires(&self) -> impl Fn(&Parameter) -> Option<Arc<dyn Wire>> + Send + Sync + 'static {
        let sites = self.sends.then(|| Arc::clone(&self.sites));
        move |parameter| {
            let site = sites.as_ref()?.iter().find(|site| site.weight.is(parameter))?;
            Some(Arc::new(Float8Wire(Arc::clone(site))))
        }
    }

    /// Ends the backward passes of a step: to be called once a step, after the last of them and before the optimizer.
    ///
    /// Names the operands that held a NaN or an infinity, where that was not said at once (on a GPU, which is waited for
    /// here, once). With delayed scaling, one all-reduce finds the largest magnitudes of the step on all ranks, from
    /// which the next step has its scales.
    ///
    /// # Errors
    /// [`Error::NotFinite`], of the first operand; or when a rank fails.
    pub fn finish_gradients(&self) -> Result<()> {
        let delayed = self.sites.iter().any(|site| site.settings.delayed.is_some());
        let mut seen = Vec::new();
        for site in self.sites.iter() {
            for largest in site.take_seen() {
                let largest = match largest {
                    Some(largest) => largest.f_to_device(self.stage.device()).context("the largest magnitude")?,
                    None => Tensor::zeros([], (Kind::Float, self.stage.device())),
                };
                seen.push(largest);
            }
        }
        if seen.is_empty() || (!delayed && self.stage.device() == Device::Cpu) {
            return Ok(());
        }
        let seen = Tensor::f_stack(&seen, 0).context("the largest magnitudes")?;
        let own = numbers(&seen)?;
        for (site, own) in self.sites.iter().zip(own.chunks(3)) {
            for (operand, &largest) in Operand::ALL.into_iter().zip(own) {
                site.refuse(operand, f64::from(largest))?;
            }
        }
        if delayed {
            let all = numbers(&self.stage.all_reduce(&seen, ReduceOp::Max)?)?;
            for (site, all) in self.sites.iter().zip(all.chunks(3)) {
                site.remember(std::array::from_fn(|operand| all[operand]));
            }
        }
        Ok(())
    }

    /// Forgets the magnitudes that were noted since the last [`finish_gradients`](Self::finish_gradients): after passes that
    /// are no part of training, so that scales do not depend on them.
    pub fn forget_seen(&self) {
        self.sites.iter().for_each(|site| drop(site.take_seen()));
    }

    /// Computes the scales of all weights that travel in Float8, with one all-reduce: to be called whenever weights have
    /// changed, after the optimizer's step and after a checkpoint was loaded. Until it was called once, each weight asks
    /// the other ranks for itself.
    ///
    /// Does nothing unless `precompute_float8_dynamic_scale_for_fsdp` is on.
    ///
    /// # Errors
    /// When a weight has no storage or is not finite, or a rank fails.
    pub fn precompute_scales(&self) -> Result<()> {
        if !self.ahead || self.sites.is_empty() {
            return Ok(());
        }
        let mut own = Vec::new();
        for site in self.sites.iter() {
            let local = site.weight.local().map_err(Error::Parameter)?;
            let largest = amax(&site.as_computed(&local.detach())?)?;
            site.note(Operand::Weight, &largest)?;
            own.push(largest.f_to_device(self.weight.device()).context("the largest magnitude")?);
        }
        let own = Tensor::f_stack(&own, 0).context("the largest magnitudes")?;
        let all = self.weight.all_reduce(&own, ReduceOp::Max)?;
        let power_of_two = self.sites.iter().any(|site| site.settings.power_of_two);
        let scales = scale_for(&all, Format::E4m3, power_of_two)?;
        for (index, site) in self.sites.iter().enumerate() {
            let pick = |of: &Tensor| of.f_select(0, index as i64).context("a scale");
            site.set_ahead(pick(&all)?, pick(&scales)?);
        }
        Ok(())
    }

    /// The largest magnitudes of the last steps, by weight: of its inputs, of itself, and of its outputs' gradients, oldest
    /// first. The state of delayed scaling, for a checkpoint; the same on every rank of a stage, whatever the mesh.
    #[must_use]
    pub fn histories(&self) -> BTreeMap<String, [Vec<f32>; 3]> {
        self.sites.iter().map(|site| (site.name(), site.history())).collect()
    }

    /// Puts back what [`histories`](Self::histories) gave. Those of other stages' weights may be among them.
    ///
    /// # Errors
    /// When one is missing; nothing has changed then.
    pub fn restore(&self, histories: &BTreeMap<String, [Vec<f32>; 3]>) -> Result<()> {
        let find = |site: &Site| {
            histories.get(site.weight.name()).ok_or_else(|| Error::MissingHistory { weight: site.name() })
        };
        let found = self.sites.iter().map(|site| find(site)).collect::<Result<Vec<_>>>()?;
        self.sites.iter().zip(found).for_each(|(site, steps)| site.set_history(steps));
        Ok(())
    }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    let host = tensor.f_to_device(Device::Cpu).context("the largest magnitudes")?;
    Vec::<f32>::try_from(&host).context("the largest magnitudes")
}
