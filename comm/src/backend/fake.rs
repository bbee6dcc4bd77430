//! One rank of many, alone: collectives are recorded, and answered as if every rank held what this one holds.
//!
//! For dry runs of meshes that no machine at hand could hold: shapes, kinds, counts and bytes are those of a real run,
//! values are not.

use std::sync::Arc;

use ferrotitan_mesh::{Degrees, Grid};
use tch::{Device, TchError, Tensor};

use crate::call::{Call, Collective, Cut};
use crate::group::duplicate;
use crate::{Backend, Buffers, DeviceMesh, Members, Recorder, ReduceOp, Result, Transport, Work};

/// The place of `rank` in a mesh of these degrees, without other ranks. What it receives from a peer is zeros.
///
/// # Errors
/// [`crate::Error::Mesh`] for bad degrees or a rank outside them.
pub fn mesh(degrees: Degrees, rank: usize, device: Device) -> Result<DeviceMesh> {
    DeviceMesh::new(Grid::new(degrees, rank)?, device, Arc::new(Fake { device }), Recorder::default())
}

#[derive(Debug)]
struct Fake {
    device: Device,
}

impl Backend for Fake {
    fn join(&self, members: &Members) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Alone { members: members.clone(), device: self.device }))
    }

    fn fail(&self, _rank: usize, _reason: &str) {}
}

#[derive(Debug)]
struct Alone {
    members: Members,
    device: Device,
}

impl Transport for Alone {
    fn start(&self, _sequence: u64, call: Call, buffers: Buffers) -> Result<Box<dyn Work>> {
        let answer = self.answer(&call, buffers);
        Ok(Box::new(Answered(answer.map_err(|error| self.members.backend(call.op(), error))?)))
    }
}

impl Alone {
    fn answer(&self, call: &Call, buffers: Buffers) -> Result<Tensor, TchError> {
        let _no_grad = tch::no_grad_guard();
        let (rank, size) = (self.members.index(), self.members.size());
        let Some(input) = buffers.input else {
            return Tensor::f_zeros(call.output_shape(rank), (call.kind, self.device));
        };
        let slice = |cut: &Cut| input.f_narrow(cut.axis as i64, cut.offset(rank), cut.sizes[rank]);
        let times_size = |tensor: Tensor| tensor.f_mul_scalar(size as i64)?.f_to_kind(call.kind);
        let answer = match &call.what {
            Collective::AllReduce { reduce: ReduceOp::Sum } => times_size(input)?,
            Collective::AllReduce { reduce: ReduceOp::Product } => {
                input.f_pow_tensor_scalar(size as i64)?.f_to_kind(call.kind)?
            }
            Collective::AllGather { parts } => fill(&input, parts)?,
            Collective::ReduceScatter { parts } => times_size(slice(parts)?)?,
            Collective::AllToAll { split, concat } => fill(&slice(split)?, concat)?,
            Collective::Send { .. } => Tensor::new(),
            _ => duplicate(&input)?,
        };
        match buffers.output {
            Some(mut output) => {
                output.f_copy_(&answer)?;
                Ok(output)
            }
            None => Ok(answer),
        }
    }
}

/// A tensor as long along the cut's axis as all its parts, filled by repeating `own`; zeros where that is empty.
fn fill(own: &Tensor, parts: &Cut) -> Result<Tensor, TchError> {
    let (axis, total) = (parts.axis as i64, parts.total());
    let length = own.size()[parts.axis];
    if length == 0 {
        let mut shape = own.size();
        shape[parts.axis] = total;
        return Tensor::f_zeros(shape, (own.kind(), own.device()));
    }
    let copies = (total + length - 1) / length;
    let repeated = vec![own; copies.max(1) as usize];
    Tensor::f_cat(&repeated, axis)?.f_narrow(axis, 0, total)?.f_contiguous()
}

struct Answered(Tensor);

impl Work for Answered {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Tensor> {
        Ok(self.0)
    }
}
