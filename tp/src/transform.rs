//! The transform that divides a model among the ranks that share its projections.

use ferrotitan_comm::DeviceMesh;
use ferrotitan_mesh::{Layout, Mesh, Parts, View};
use ferrotitan_nn::{ChunkedCrossEntropy, Layer, Linear, Model, NamedLayer, Parameter, Reader, Seam, Transform};

use crate::column::ColumnParallel;
use crate::crossing::Residual;
use crate::embedding::VocabularyEmbedding;
use crate::head::{GatheredLoss, VocabularyHead};
use crate::loss::VocabularyCrossEntropy;
use crate::row::RowParallel;
use crate::scope::Scope;
use crate::{Error, Heads, Plan, Result, Style, reader};

/// Into how many pieces asynchronous tensor parallelism cuts a sequence. More hide a larger part of the travel, and make
/// the products smaller.
const PIECES: usize = 4;

/// How tensor parallelism works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Between the split projections each rank holds a share of the sequence instead of the whole.
    pub sequence_parallel: bool,
    /// The loss seam is replaced by cross-entropy of split logits, which no rank ever holds whole. A model with another
    /// loss switches this off: its own loss is then computed by every rank, of gathered logits.
    pub loss_parallel: bool,
    /// Sequences travel in pieces, each while its neighbour is multiplied.
    pub async_tp: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { sequence_parallel: true, loss_parallel: true, async_tp: false }
    }
}

/// Divides a model's projections, embedding and loss among the ranks of the mesh's `tp` dimension, as a [`Plan`] says.
///
/// It replaces the seams `Linear` and `Loss` and the embedding, keeps each projection's `Gemm`, and sets the parameters'
/// layouts. Sequences, widths and vocabularies need not divide by the degree. If it fails, the model is of no more use.
#[derive(Debug)]
pub struct TensorParallel {
    mesh: DeviceMesh,
    options: Options,
    plan: Plan,
}

impl TensorParallel {
    /// Over the `tp` dimension of this mesh.
    #[must_use]
    pub fn new(mesh: DeviceMesh, options: Options, plan: Plan) -> Self {
        Self { mesh, options, plan }
    }

    fn attach(&self, model: &mut Model) -> Result<()> {
        let parameters = model.parameters();
        if self.mesh.size(View::PP) == 1 {
            self.plan.check(parameters.iter().map(Parameter::name))?;
        }
        for parameter in &parameters {
            self.lay_out(parameter)?;
        }
        let pieces = if self.options.async_tp { PIECES } else { 1 };
        let residual = Residual::new(self.mesh.group(View::TP)?, self.options.sequence_parallel, pieces);
        let layers = std::mem::take(model.layers_mut());
        let layers: Result<Vec<_>> = layers.into_iter().map(|layer| self.divide(layer, &residual)).collect();
        *model.layers_mut() = layers?;
        Ok(())
    }

    fn style(&self, parameter: &Parameter) -> Result<Style> {
        self.plan.style(parameter.name()).ok_or_else(|| Error::Unplanned { name: parameter.name().into() })
    }

    /// Divides a parameter, and completes its gradient where several ranks hold it.
    fn lay_out(&self, parameter: &Parameter) -> Result<()> {
        let (ranks, layout) = (self.mesh.size(View::TP), parameter.layout());
        let split = |axis: usize, parts: Parts| {
            let divided = Layout::shard(layout.clone(), View::TP, axis, parts);
            divided.map_err(|source| Error::Layout { name: parameter.name().into(), source })
        };
        let by_heads = |heads: Heads, axis: usize| {
            let length = layout.shape().get(axis).copied().unwrap_or(0);
            heads.parts(length, ranks).map_err(|problem| Error::Heads { name: parameter.name().into(), problem })
        };
        let mut reader: Option<Reader> = None;
        let divided = match self.style(parameter)? {
            Style::Column | Style::Vocabulary => split(0, Parts::Even)?,
            Style::Row => split(1, Parts::Even)?,
            Style::ColumnByHeads(heads) => {
                let parts = by_heads(heads, 0)?;
                let copies = Heads::copies(&parts);
                if copies > 1 {
                    reader = Some(reader::summed_over_copies(self.mesh.group(View::TP)?, copies));
                }
                split(0, parts)?
            }
            Style::RowByHeads(heads) => {
                let parts = by_heads(heads, 1)?;
                if Heads::copies(&parts) > 1 {
                    let problem =
                        format!("{} heads cannot be dealt to {ranks} ranks: use at most {0} ranks", heads.key_value);
                    return Err(Error::Heads { name: parameter.name().into(), problem });
                }
                split(1, parts)?
            }
            style @ (Style::Replicated | Style::ReplicatedInside) => {
                if self.options.sequence_parallel || style == Style::ReplicatedInside {
                    reader = Some(reader::summed(self.mesh.group(View::TP)?));
                }
                layout
            }
        };
        parameter.set_layout(divided);
        if reader.is_some() {
            parameter.set_reader(reader);
        }
        Ok(())
    }

    /// Replaces what is split in a layer.
    fn divide(&self, named: NamedLayer, residual: &Residual) -> Result<NamedLayer> {
        let NamedLayer { name, mut layer } = named;
        let mut projected: Vec<Parameter> = Vec::new();
        let mut has_head = false;
        let seams = layer.seams();
        for (_, seam) in &seams {
            let Seam::Linear(linear) = seam else { continue };
            let weights = linear.projections().iter().map(|projection| projection.weight.clone());
            projected.extend(weights);
            has_head |= self.common_style(&***linear)? == Some(Style::Vocabulary);
        }
        for (_, seam) in seams {
            match seam {
                Seam::Linear(linear) => self.replace(linear, residual)?,
                Seam::Loss(loss) if has_head => {
                    let standing = ChunkedCrossEntropy::default();
                    let inner = std::mem::replace(loss, Box::new(standing));
                    *loss = match self.options.loss_parallel {
                        true => Box::new(VocabularyCrossEntropy::new(residual.clone(), standing.logits)),
                        false => Box::new(GatheredLoss::new(inner, residual.clone())),
                    };
                }
                Seam::Loss(_) | Seam::Attention(_) => {}
            }
        }
        let parameters = layer.parameters();
        for parameter in parameters.iter().filter(|own| !projected.iter().any(|known| known.is(own))) {
            match self.style(parameter)? {
                Style::Replicated | Style::ReplicatedInside => {}
                Style::Vocabulary if parameters.len() == 1 => {
                    let embedding = VocabularyEmbedding::new(parameter.clone(), residual.clone());
                    return Ok(NamedLayer::new(name, embedding));
                }
                style => return Err(misplaced(parameter, style)),
            }
        }
        let layer: Box<dyn Layer> = match projected.is_empty() {
            true => layer,
            false => Box::new(Scope::new(layer, residual.clone())),
        };
        Ok(NamedLayer { name, layer })
    }

    /// Replaces a `Linear` by the form of its style.
    fn replace(&self, linear: &mut Box<dyn Linear>, residual: &Residual) -> Result<()> {
        let style = self.common_style(&**linear)?;
        let mut take = || std::mem::take(linear.projections_mut());
        *linear = match style {
            Some(Style::Column | Style::ColumnByHeads(_)) => Box::new(ColumnParallel::new(take(), residual.clone())),
            Some(Style::Row | Style::RowByHeads(_)) => Box::new(RowParallel::new(take(), residual.clone())),
            Some(Style::Vocabulary) => Box::new(VocabularyHead::new(take(), residual.clone())),
            Some(Style::Replicated | Style::ReplicatedInside) | None => return Ok(()),
        };
        Ok(())
    }

    /// The style of all projections of a `Linear`; none where it has none.
    fn common_style(&self, linear: &dyn Linear) -> Result<Option<Style>> {
        let [first, others @ ..] = linear.projections() else { return Ok(None) };
        let first_style = self.style(&first.weight)?;
        for other in others {
            let second_style = self.style(&other.weight)?;
            if second_style != first_style {
                let (first, second) = (first.weight.name().into(), other.weight.name().into());
                return Err(Error::MixedStyles { first, first_style, second, second_style });
            }
        }
        Ok(Some(first_style))
    }
}

impl Transform for TensorParallel {
    fn apply(&self, model: &mut Model, _mesh: &dyn Mesh) -> ferrotitan_nn::Result<()> {
        self.attach(model).map_err(|source| ferrotitan_nn::Error::Other {
            context: "tensor parallelism".into(),
            source: source.into(),
        })
    }
}

fn misplaced(parameter: &Parameter, style: Style) -> Error {
    let (place, remedy) = match style {
        Style::Vocabulary => (
            "in a layer with other parameters",
            "make the embedding a layer of its own, or give the parameter the style Replicated",
        ),
        _ => ("outside every Linear seam of its layer", "show the projection as a seam, or use the style Replicated"),
    };
    Error::Misplaced { name: parameter.name().into(), style, place, remedy }
}
