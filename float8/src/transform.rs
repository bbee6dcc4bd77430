//! The transform that puts a model's products into eight bits.

use std::sync::{Arc, Mutex, PoisonError};

use ferrotitan_comm::DeviceMesh;
use ferrotitan_mesh::{Mesh, View};
use ferrotitan_nn::{Model, Parameter, Projection, Seam, Transform};

use crate::filter::{self, Candidate};
use crate::gemm::Float8Gemm;
use crate::site::{Groups, Settings, Site, Track};
use crate::{BLOCK, Error, Handle, Recipe, Result};

/// What is cast, and how. Names are TorchTitan's where it has the setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How the three products are computed.
    pub recipe: Recipe,
    /// Projections whose name holds one of these are left as they are; [`AUTO_FILTER`](crate::AUTO_FILTER) among them
    /// leaves out those that are too small to gain.
    pub filter_fqns: Vec<String>,
    /// Multiplies the numbers that eight bits stand for, even where the device has a product of its own.
    pub emulate: bool,
    /// Rounds `tensorwise` scales down to powers of two, as those of the other recipes always are. Scales of different
    /// layouts then differ by powers of two, which changes nothing but what vanishes.
    pub power_of_two: bool,
    /// `tensorwise`: scales by the largest magnitude of the last so many steps instead of the operand's own
    /// (Micikevicius et al. 2022). [`Handle::finish_gradients`] ends a step. Elements that outgrow the history saturate.
    pub delayed: Option<usize>,
    /// `tensorwise`: sharded weights travel in eight bits, by [`Handle::wires`].
    pub enable_fsdp_float8_all_gather: bool,
    /// Computes the scales of all weights that travel with one all-reduce, in [`Handle::precompute_scales`].
    pub precompute_float8_dynamic_scale_for_fsdp: bool,
    /// Activations and their gradients share their scales with those of all ranks that work on the same batch, so that
    /// data and context parallelism change nothing in them. A small all-reduce for each cast.
    pub global_activation_scales: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            recipe: Recipe::Tensorwise,
            // The head's gradients need more bits.
            filter_fqns: vec!["output".into()],
            emulate: false,
            power_of_two: false,
            delayed: None,
            enable_fsdp_float8_all_gather: false,
            precompute_float8_dynamic_scale_for_fsdp: false,
            global_activation_scales: false,
        }
    }
}

impl Options {
    /// Options with another recipe than the default.
    #[must_use]
    pub fn of(recipe: Recipe) -> Self {
        Self { recipe, ..Self::default() }
    }

    fn check(&self) -> Result<()> {
        let tensorwise = self.recipe == Recipe::Tensorwise;
        let needs = |setting| Err(Error::NeedsTensorwise { setting, recipe: self.recipe });
        match self.delayed {
            Some(0) => return Err(Error::NoHistory),
            Some(_) if !tensorwise => return needs("delayed scaling"),
            _ => {}
        }
        if self.enable_fsdp_float8_all_gather && !tensorwise {
            return needs("enable_fsdp_float8_all_gather");
        }
        if self.precompute_float8_dynamic_scale_for_fsdp && !self.enable_fsdp_float8_all_gather {
            return Err(Error::NoWire);
        }
        Ok(())
    }
}

/// Replaces the [`Gemm`](ferrotitan_nn::Gemm) of a model's projections by one that computes in eight bits.
///
/// Applied after tensor parallelism, whose layouts tell which ranks share a scale, and before what wraps products or
/// layers. If it fails, the model is of no more use.
#[derive(Debug)]
pub struct Float8 {
    options: Options,
    mesh: Option<DeviceMesh>,
    handles: Mutex<Vec<Handle>>,
}

impl Float8 {
    /// For a model on one rank.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self { options, mesh: None, handles: Mutex::default() }
    }

    /// For one rank of a mesh.
    #[must_use]
    pub fn with_mesh(mut self, mesh: &DeviceMesh) -> Self {
        self.mesh = Some(mesh.clone());
        self
    }

    /// The handles of the models that it was applied to, in order.
    #[must_use]
    pub fn handles(&self) -> Vec<Handle> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Refuses filters that match none of the weights of these names, those of a whole model. [`Self::attach`] does so
    /// itself, except on a mesh with pipeline stages, where no rank sees all names.
    ///
    /// # Errors
    /// [`Error::Filter`].
    pub fn check<'a>(&self, weights: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let candidate = |weight| Candidate { seam: weight, weight, inputs: 0, outputs: 0 };
        let candidates: Vec<_> = weights.into_iter().map(candidate).collect();
        filter::check(&self.options.filter_fqns, &candidates)
    }

    /// Converts a model, and says in the log what is left out. Ranks do it together.
    ///
    /// # Errors
    /// When options contradict each other, a filter matches nothing or leaves nothing, products are replaced already, or
    /// the model does not fit the mesh.
    pub fn attach(&self, model: &mut Model) -> Result<Handle> {
        self.options.check()?;
        let groups = match &self.mesh {
            Some(mesh) => Groups::of(mesh, self.options.global_activation_scales)?,
            None => Groups::alone(),
        };
        let mut seams = model.seams();
        let mut found: Vec<(&str, Arc<Mutex<Track>>, &mut Projection)> = Vec::new();
        for (name, seam) in &mut seams {
            let Seam::Linear(linear) = seam else { continue };
            let input = Arc::default();
            let of_input = |projection| (name.as_str(), Arc::clone(&input), projection);
            found.extend(linear.projections_mut().iter_mut().map(of_input));
        }
        let weights: Vec<_> = found.iter().map(|(_, _, projection)| projection.weight.clone()).collect();
        let shapes: Vec<_> = weights.iter().map(|weight| weight.layout().shape().to_vec()).collect();
        let candidates: Vec<_> = std::iter::zip(&found, std::iter::zip(&weights, &shapes))
            .map(|((seam, ..), (weight, shape))| Candidate {
                seam,
                weight: weight.name(),
                inputs: shape.get(1).copied().unwrap_or(0),
                outputs: shape.first().copied().unwrap_or(0),
            })
            .collect();
        let whole = self.mesh.as_ref().is_none_or(|mesh| mesh.size(View::PP) == 1);
        if whole {
            filter::check(&self.options.filter_fqns, &candidates)?;
        }
        let reasons: Vec<_> = candidates
            .iter()
            .map(|candidate| candidate.reason(self.options.recipe, &self.options.filter_fqns))
            .collect();
        if whole && reasons.iter().all(Option::is_some) {
            let problem = "no projection is left for Float8; shorten filter_fqns".to_owned();
            let names = weights.iter().map(|weight| weight.name().to_owned()).collect();
            return Err(Error::Filter { problem, names });
        }
        let (mut sites, mut left_out) = (Vec::new(), Vec::new());
        for ((_, input, projection), reason) in found.into_iter().zip(reasons) {
            match reason {
                Some(reason) => left_out.push((projection.weight.name().to_owned(), reason)),
                None => sites.push(self.convert(projection, &groups, input)?),
            }
        }
        tell(&left_out, sites.len());
        let (sends, ahead) =
            (self.options.enable_fsdp_float8_all_gather, self.options.precompute_float8_dynamic_scale_for_fsdp);
        Ok(Handle::new(sites, left_out, &groups, sends, ahead))
    }

    fn convert(&self, projection: &mut Projection, groups: &Groups, input: Arc<Mutex<Track>>) -> Result<Arc<Site>> {
        let (options, weight) = (&self.options, projection.weight.clone());
        if !projection.gemm.is_native() {
            return Err(Error::Taken { weight: weight.name().to_owned() });
        }
        self.check_layout(&weight)?;
        let settings = Settings {
            recipe: options.recipe,
            emulate: options.emulate,
            power_of_two: options.power_of_two || options.recipe.has_powers_of_two(),
            delayed: options.delayed,
        };
        let site = Arc::new(Site::new(weight, settings, groups.clone(), input));
        projection.gemm = Arc::new(Float8Gemm::new(Arc::clone(&site)));
        Ok(site)
    }

    fn check_layout(&self, weight: &Parameter) -> Result<()> {
        let (layout, name) = (weight.layout(), || weight.name().to_owned());
        let Some(mesh) = &self.mesh else {
            return if layout.splits().is_empty() { Ok(()) } else { Err(Error::NoMesh { weight: name() }) };
        };
        if self.options.recipe != Recipe::Mxfp8 {
            return Ok(());
        }
        let ranges: Vec<_> = layout.local_region(mesh).ranges().collect();
        let cuts = |range: &std::ops::Range<usize>| [range.start, range.end].iter().any(|at| at % BLOCK as usize != 0);
        match ranges.into_iter().enumerate().find(|(_, range)| cuts(range)) {
            Some((axis, range)) => Err(Error::CutBlock { weight: name(), axis, range }),
            None => Ok(()),
        }
    }
}

impl Transform for Float8 {
    fn apply(&self, model: &mut Model, mesh: &dyn Mesh) -> ferrotitan_nn::Result<()> {
        let place = |mesh: &dyn Mesh| format!("rank {} of {}", mesh.rank(), mesh.degrees());
        if let Some(own) = &self.mesh
            && (mesh.rank(), mesh.degrees()) != (own.rank(), own.degrees())
        {
            return Err(Error::OtherMesh { made_for: place(own), applied_to: place(mesh) }.into());
        }
        let handle = self.attach(model)?;
        self.handles.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
        Ok(())
    }
}

/// One line a reason, with the names that it holds for.
fn tell(left_out: &[(String, String)], converted: usize) {
    let mut reasons: Vec<&str> = left_out.iter().map(|(_, reason)| reason.as_str()).collect();
    reasons.sort_unstable();
    reasons.dedup();
    for reason in reasons {
        let names = left_out.iter().filter(|(_, of)| of == reason).map(|(name, _)| name.as_str());
        tracing::info!("not in Float8, since {reason}: {}", names.collect::<Vec<_>>().join(", "));
    }
    tracing::info!("{converted} projections compute in Float8");
}
