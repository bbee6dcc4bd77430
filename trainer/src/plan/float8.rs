//! Which products are in eight bits, and how.

use crate::config::sections::{Float8Recipe, Float8Scaling, MxRecipe};
use crate::config::{Config, Problem, current_name, nearest};

/// Which products are in eight bits, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Float8Plan {
    /// What shares a scale.
    pub sharing: ScaleSharing,
    /// Projections that are left as they are: those whose names hold one of these.
    pub filter_fqns: Vec<String>,
    /// Without the device's own products.
    pub emulate: bool,
    /// Scales come of the largest magnitudes of the last so many steps.
    pub amax_history: Option<usize>,
    /// Sharded weights are gathered in Float8.
    pub all_gather: bool,
    /// The scales of all weights are computed together after each update.
    pub precompute_scales: bool,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleSharing {
    /// What a recipe of Float8 says.
    Recipe(Float8Recipe),
    /// 32 neighbours: MX.
    Block,
}

const CONVERTERS: &str = "model.converters";
/// A converter has the name of its section, of today or an older one.
const FLOAT8: &str = "quantize.linear.float8";
const MX: &str = "quantize.linear.mx";
const KNOWN: [&str; 4] = [FLOAT8, MX, "quantize.grouped_mm.float8", "quantize.grouped_mm.mx"];

impl Float8Plan {
    /// What the config asks for, if it does.
    ///
    /// # Errors
    /// Everything in it that does not fit together.
    pub(crate) fn of(config: &Config) -> Result<Option<Self>, Vec<Problem>> {
        let converters: Vec<String> = config.model.converters.0.iter().map(|name| current_name(name)).collect();
        let mut problems: Vec<Problem> = converters.iter().filter_map(|name| unknown(name)).collect();
        let asks = |name| converters.iter().any(|converter| converter == name);
        let plan = match (asks(FLOAT8), asks(MX)) {
            (true, true) => {
                let message = "a product cannot be in Float8 and in a microscaling format at once";
                problems.push(Problem::new(&[CONVERTERS], message).help("keep one of the two converters"));
                None
            }
            (true, false) => {
                problems.extend(contradictions(config));
                Some(Self::float8(config))
            }
            (false, true) => Some(Self::mx(config)),
            (false, false) => None,
        };
        if problems.is_empty() { Ok(plan) } else { Err(problems) }
    }

    fn float8(config: &Config) -> Self {
        let float8 = &config.quantize.linear.float8;
        let names = &float8.filter_fqns.0;
        let delayed = float8.scaling == Float8Scaling::Delayed;
        Self {
            sharing: ScaleSharing::Recipe(float8.recipe_name.unwrap_or(Float8Recipe::Tensorwise)),
            // TorchTitan's configs name the head; where nothing is named, its gradients still need more bits.
            filter_fqns: if names.is_empty() { vec!["output".to_owned()] } else { names.clone() },
            emulate: float8.emulate,
            amax_history: delayed.then(|| usize::try_from(float8.amax_history).unwrap_or(usize::MAX)),
            all_gather: float8.enable_fsdp_float8_all_gather,
            // As in TorchTitan, it says nothing by itself.
            precompute_scales: float8.enable_fsdp_float8_all_gather && float8.precompute_float8_dynamic_scale_for_fsdp,
        }
    }

    fn mx(config: &Config) -> Self {
        let mx = &config.quantize.linear.mx;
        Self {
            sharing: ScaleSharing::Block,
            filter_fqns: mx.filter_fqns.0.clone(),
            emulate: mx.recipe_name == MxRecipe::Emulated,
            amax_history: None,
            all_gather: false,
            precompute_scales: false,
        }
    }
}

fn unknown(converter: &str) -> Option<Problem> {
    if KNOWN.contains(&converter) {
        return None;
    }
    let problem = Problem::new(&[CONVERTERS], format!("there is no converter `{converter}`"));
    let near = nearest(converter, KNOWN).unwrap_or(FLOAT8);
    Some(problem.help(format!("the nearest is `{near}`; there are {}", KNOWN.join(", "))))
}

/// Settings of Float8 that exclude each other.
fn contradictions(config: &Config) -> Vec<Problem> {
    const GATHER: &str = "quantize.linear.float8.enable_fsdp_float8_all_gather";
    const RECIPE: &str = "quantize.linear.float8.recipe_name";
    const SCALING: &str = "quantize.linear.float8.scaling";
    let float8 = &config.quantize.linear.float8;
    let mut problems = Vec::new();
    if let Some(recipe) = float8.recipe_name.filter(|recipe| *recipe != Float8Recipe::Tensorwise) {
        let needs = |key: &str, what: &str| {
            let message = format!("{what} needs the recipe \"tensorwise\", not \"{recipe}\"");
            Problem::new(&[key, RECIPE], message).help(format!("leave out `{key}`, or `{RECIPE}`"))
        };
        if float8.enable_fsdp_float8_all_gather {
            problems.push(needs(GATHER, "gathering weights in Float8"));
        }
        if float8.scaling == Float8Scaling::Delayed {
            problems.push(needs(SCALING, "delayed scaling"));
        }
    }
    problems
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::sections::Names;

    fn asking(names: &[&str]) -> Config {
        let mut config = Config::default();
        config.model.converters = Names::of(names);
        config
    }

    #[test]
    fn converters_have_the_names_of_their_sections() {
        assert_eq!(Float8Plan::of(&Config::default()), Ok(None));
        for name in ["float8", "quantize.linear.float8", "quantize.dense.float8"] {
            let plan = Float8Plan::of(&asking(&[name])).unwrap().unwrap();
            assert_eq!(plan.sharing, ScaleSharing::Recipe(Float8Recipe::Tensorwise));
            assert_eq!((plan.filter_fqns, plan.amax_history), (vec!["output".to_owned()], None));
        }
        for name in ["mx", "quantize.linear.mx"] {
            let mut config = asking(&[name]);
            let plan = Float8Plan::of(&config).unwrap().unwrap();
            assert_eq!((plan.sharing, plan.emulate), (ScaleSharing::Block, false));
            assert_eq!(plan.filter_fqns, ["output"]);
            config.quantize.linear.mx.recipe_name = MxRecipe::Emulated;
            config.quantize.linear.mx.filter_fqns = Names::of(&["wk", "output"]);
            let plan = Float8Plan::of(&config).unwrap().unwrap();
            assert_eq!((plan.emulate, plan.filter_fqns), (true, vec!["wk".to_owned(), "output".to_owned()]));
        }
        // The experts' are known, and refused elsewhere.
        assert_eq!(Float8Plan::of(&asking(&["quantize.grouped_mm.mx"])), Ok(None));
    }

    #[test]
    fn delayed_scaling_has_a_history() {
        let mut config = asking(&["float8"]);
        config.quantize.linear.float8.scaling = Float8Scaling::Delayed;
        assert_eq!(Float8Plan::of(&config).unwrap().unwrap().amax_history, Some(16));
        config.quantize.linear.float8.amax_history = 3;
        assert_eq!(Float8Plan::of(&config).unwrap().unwrap().amax_history, Some(3));
    }

    #[test]
    fn contradictions_are_told_all_at_once() {
        let mut config = asking(&["float8", "mx", "flaot8"]);
        let problems = Float8Plan::of(&config).unwrap_err();
        assert_eq!(problems.len(), 2);
        assert!(problems[0].message.contains("`flaot8`") && problems[1].message.contains("at once"), "{problems:?}");

        config.model.converters = Names::of(&["float8"]);
        let float8 = &mut config.quantize.linear.float8;
        float8.recipe_name = Some(Float8Recipe::Rowwise);
        float8.enable_fsdp_float8_all_gather = true;
        float8.scaling = Float8Scaling::Delayed;
        assert_eq!(Float8Plan::of(&config).unwrap_err().len(), 2);
        let float8 = &mut config.quantize.linear.float8;
        (float8.recipe_name, float8.scaling) = (None, Float8Scaling::Dynamic);
        float8.precompute_float8_dynamic_scale_for_fsdp = true;
        assert!(Float8Plan::of(&config).unwrap().unwrap().precompute_scales);
        config.quantize.linear.float8.enable_fsdp_float8_all_gather = false;
        assert!(!Float8Plan::of(&config).unwrap().unwrap().precompute_scales);
        // Settings of what was not asked for are no mistake.
        config.model.converters = Names::default();
        assert_eq!(Float8Plan::of(&config), Ok(None));
    }
}
