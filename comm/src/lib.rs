#![doc = include_str!("../README.md")]

mod autograd;
pub mod backend;
mod call;
mod collectives;
pub mod conformance;
mod device_mesh;
mod error;
mod group;
mod members;
mod op;
mod pending;
mod recorder;
mod transport;
mod values;
mod wire;

pub use backend::{fake, processes, threads};
pub use call::{Call, Collective, Cut};
pub use device_mesh::DeviceMesh;
pub use error::{BoxError, Error, Result};
pub use ferrotitan_mesh as mesh;
pub use group::Group;
pub use members::Members;
pub use op::{Op, ReduceOp};
pub use pending::Pending;
pub use recorder::{Event, Failure, Mark, Recorder, Total};
pub use tch;
pub use transport::{Backend, Buffers, Transport, Work};
pub use wire::Wire;
