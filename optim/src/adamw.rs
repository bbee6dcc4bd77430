//! AdamW (Loshchilov and Hutter 2019, <https://arxiv.org/abs/1711.05101>) by libtorch's fused kernel.

use ferrotitan_ext::optim::{AdamwStep, fused_adamw};
use ferrotitan_nn::Parameter;
use globset::GlobBuilder;
use tch::{Kind, Tensor};

use crate::{Error, Result};

/// Settings of AdamW, one set a parameter group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Learning rate, before the schedule's factor.
    pub lr: f64,
    /// How slowly the mean of the gradients moves.
    pub beta1: f64,
    /// How slowly the mean of their squares moves.
    pub beta2: f64,
    /// Added to the root of the mean square.
    pub eps: f64,
    /// By how much, in units of the learning rate, a parameter shrinks each step.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { lr: 8e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

/// A group of parameters with settings of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupOptions {
    /// A glob over parameter names, such as `*norm.weight`; a parameter belongs to the first group that matches.
    pub pattern: String,
    /// The group's settings.
    pub options: AdamWOptions,
}

/// AdamW over this rank's shards.
///
/// It is elementwise, so shards need nothing of each other.
#[derive(Debug)]
pub struct AdamW {
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    options: AdamWOptions,
    members: Vec<Moments>,
}

/// What AdamW remembers of a parameter; it lies on the mesh as the parameter does.
#[derive(Debug)]
pub struct Moments {
    /// Whose moments they are.
    pub parameter: Parameter,
    /// Running mean of the gradients, shape and dtype of the shard.
    pub exp_avg: Tensor,
    /// Running mean of the squared gradients, shape and dtype of the shard.
    pub exp_avg_sq: Tensor,
    /// Number of updates so far, an fp32 scalar.
    pub step: Tensor,
}

impl AdamW {
    /// Over all trainable `parameters`, those that no group claims with the default `options`.
    ///
    /// # Errors
    /// When a parameter has no storage, a pattern is no glob or matches nothing, or a setting is out of range.
    pub fn new(parameters: Vec<Parameter>, options: AdamWOptions, groups: &[GroupOptions]) -> Result<Self> {
        options.validate()?;
        let trainable: Vec<Parameter> = parameters.into_iter().filter(Parameter::is_trainable).collect();
        let mut matchers = Vec::new();
        for group in groups {
            group.options.validate()?;
            let glob = GlobBuilder::new(&group.pattern)
                .build()
                .map_err(|error| Error::Pattern { pattern: group.pattern.clone(), reason: error.kind().to_string() })?;
            let matcher = glob.compile_matcher();
            if !trainable.iter().any(|parameter| matcher.is_match(parameter.name())) {
                let known: Vec<&str> = trainable.iter().take(8).map(Parameter::name).collect();
                return Err(Error::NoMatch { pattern: group.pattern.clone(), known: known.join(", ") });
            }
            matchers.push(matcher);
        }
        let settings = groups.iter().map(|group| group.options).chain([options]);
        let mut groups: Vec<Group> = settings.map(|options| Group { options, members: Vec::new() }).collect();
        for parameter in trainable {
            let claimed = matchers.iter().position(|matcher| matcher.is_match(parameter.name()));
            let group = claimed.unwrap_or(matchers.len());
            groups[group].members.push(Moments::new(parameter)?);
        }
        groups.retain(|group| !group.members.is_empty());
        Ok(Self { groups })
    }

    /// One update of every parameter that has a gradient, with the groups' learning rates times `factor`.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn step(&mut self, factor: f64) -> Result<()> {
        for Group { options, members } in &self.groups {
            let mut lists: [Vec<Tensor>; 5] = Default::default();
            for member in members {
                let Some(gradient) = member.parameter.gradient()? else { continue };
                // The kernel reads which update this is, and does not count. It is the same number on every rank.
                let _ = member.step.shallow_clone().f_add_scalar_(1).map_err(failed)?;
                // An empty shard has nothing to update, and the fused kernel does not take it.
                if gradient.numel() == 0 {
                    continue;
                }
                let parts = [&gradient, &member.exp_avg, &member.exp_avg_sq, &member.step];
                lists[0].push(member.parameter.local()?.detach());
                lists[1..].iter_mut().zip(parts).for_each(|(list, part)| list.push(part.shallow_clone()));
            }
            let [locals, gradients, means, squares, steps] = lists;
            if locals.is_empty() {
                continue;
            }
            let step = AdamwStep {
                lr: options.lr * factor,
                beta1: options.beta1,
                beta2: options.beta2,
                eps: options.eps,
                weight_decay: options.weight_decay,
                maximize: false,
            };
            tch::no_grad(|| fused_adamw(&step, &locals, &gradients, &means, &squares, &steps))?;
        }
        Ok(())
    }

    /// Drops all gradients.
    ///
    /// # Errors
    /// When a parameter has no storage.
    pub fn clear_gradients(&self) -> Result<()> {
        self.state().try_for_each(|moments| Ok(moments.parameter.clear_gradient()?))
    }

    /// What it remembers, for a checkpoint.
    pub fn state(&self) -> impl Iterator<Item = &Moments> {
        self.groups.iter().flat_map(|group| &group.members)
    }
}

impl Moments {
    fn new(parameter: Parameter) -> Result<Self> {
        let local = parameter.local()?;
        let zeros =
            || tch::no_grad(|| local.f_zeros_like()).map_err(|source| Error::Torch { context: "AdamW", source });
        Ok(Self {
            exp_avg: zeros()?,
            exp_avg_sq: zeros()?,
            step: Tensor::zeros([], (Kind::Float, local.device())),
            parameter,
        })
    }
}

fn failed(source: tch::TchError) -> Error {
    Error::Torch { context: "AdamW", source }
}

impl AdamWOptions {
    fn validate(&self) -> Result<()> {
        let below_one = [("beta1", self.beta1), ("beta2", self.beta2)];
        let not_negative = [("the learning rate", self.lr), ("eps", self.eps), ("the weight decay", self.weight_decay)];
        for (name, value) in below_one {
            if !(0.0..1.0).contains(&value) {
                return Err(Error::Range { name, value, range: "at least 0 and below 1" });
            }
        }
        for (name, value) in not_negative {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::Range { name, value, range: "at least 0 and finite" });
            }
        }
        Ok(())
    }
}
