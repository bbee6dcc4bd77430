#![doc = include_str!("../README.md")]

mod activation_checkpoint;
mod attention;
mod batch;
mod embedding;
mod error;
mod feed_forward;
mod gemm;
mod kept;
mod layer;
mod linear;
pub mod llama;
mod loss;
mod model;
mod norm;
mod parameter;
mod rope;

pub use activation_checkpoint::ActivationCheckpoint;
pub use attention::{Attention, Sdpa};
pub use batch::{Batch, Documents, IGNORE_INDEX};
pub use embedding::Embedding;
pub use error::{Error, Result};
pub use feed_forward::FeedForward;
pub use ferrotitan_mesh as mesh;
pub use gemm::{Activation, Gemm, Native, Packed, differentiable, kept_output, project};
pub use kept::{Operation, kept};
pub use layer::{Layer, NamedLayer, Seam};
pub use linear::{Linear, Plain, Projection};
pub use loss::{ChunkedCrossEntropy, Head, Loss, loss_by_chunk};
pub use model::{Materialize, Model, Transform};
pub use norm::RmsNorm;
pub use parameter::{Parameter, Reader};
pub use rope::{Rope, RopeScaling};
pub use tch;
