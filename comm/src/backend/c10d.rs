//! Collectives over a c10d process group: Gloo on the CPU, NCCL on CUDA.
//!
//! c10d moves whole contiguous buffers of equal parts; everything else is put together here. Parts along an inner axis
//! are packed before and unpacked after. A reduce-scatter over Gloo is an exchange and a local sum in rank order: half
//! the bytes of Gloo's own, which reduces everything everywhere, and the same bits as among threads.

use std::sync::Arc;
use std::time::Duration;

use ferrotitan_ext::process_group::{self, ProcessGroup};
use tch::{Device, Kind, TchError, Tensor};

use super::memory;
use super::outbox::Outbox;
use super::witness::Witness;
use crate::call::{Call, Collective, Cut};
use crate::group::duplicate;
use crate::{BoxError, Buffers, Error, Members, Op, ReduceOp, Result, Transport, Work};

/// How much more than the parts themselves an uneven gather may move by padding them to one length, in per cent; beyond
/// that each part is broadcast by itself.
const PADDING_PERCENT: i64 = 125;

/// The length of what ranks compare when they verify that they call the same thing, in bytes.
const SIGNATURE: usize = 512;

/// One rank's process group.
#[derive(Debug)]
pub(super) struct C10d {
    /// Emptied before the group goes.
    outbox: Outbox,
    group: Arc<ProcessGroup>,
    members: Members,
    device: Device,
    witness: Witness,
    verify: bool,
}

/// What a call ends with, once its works are done.
type Finish = Box<dyn FnOnce() -> Result<Tensor, BoxError> + Send>;

/// Works to wait for, and what is to be done then.
struct Begun(Vec<process_group::Work>, Finish);

impl Begun {
    fn new(
        works: Vec<process_group::Work>,
        finish: impl FnOnce() -> Result<Tensor, TchError> + Send + 'static,
    ) -> Self {
        Begun(works, Box::new(move || Ok(finish()?)))
    }

    fn giving(works: Vec<process_group::Work>, output: Tensor) -> Self {
        Begun::new(works, move || Ok(output))
    }
}

impl C10d {
    pub(super) fn new(group: Arc<ProcessGroup>, device: Device, witness: Witness, verify: bool) -> Self {
        let outbox = Outbox::new(device == Device::Cpu);
        C10d { outbox, group, members: witness.members().clone(), device, witness, verify }
    }

    fn begin(&self, call: &Call, buffers: Buffers) -> Result<Begun, BoxError> {
        let _no_grad = tch::no_grad_guard();
        let Buffers { input, output, .. } = buffers;
        let need = |input: Option<Tensor>| input.ok_or_else(|| BoxError::from("there is no tensor"));
        match &call.what {
            Collective::AllReduce { reduce } => self.all_reduce(need(input)?, output, *reduce),
            Collective::AllGather { parts } => self.all_gather(call, need(input)?, output, parts),
            Collective::ReduceScatter { parts } => self.reduce_scatter(call, need(input)?, output, parts),
            Collective::AllToAll { split, concat } => self.all_to_all(call, need(input)?, output, split, concat),
            Collective::Broadcast { root } => {
                let input = need(input)?;
                let output = match output {
                    Some(output) => output,
                    None if *root == self.members.index() => input,
                    None => input.f_empty_like()?,
                };
                let works = match output.numel() {
                    0 => Vec::new(),
                    _ => vec![self.group.broadcast(&bytes(&output)?, *root)?],
                };
                Ok(Begun::giving(works, output))
            }
            Collective::Send { to } => {
                let input = need(input)?;
                let works = match input.numel() {
                    0 => Vec::new(),
                    _ => vec![self.group.send(&bytes(&input)?, *to, 0)?],
                };
                Ok(Begun::giving(works, Tensor::new()))
            }
            Collective::Recv { from } => {
                let output = Tensor::f_empty(&call.shape, (call.kind, self.device))?;
                let works = match output.numel() {
                    0 => Vec::new(),
                    _ => vec![self.group.recv(&bytes(&output)?, *from, 0)?],
                };
                Ok(Begun::giving(works, output))
            }
            Collective::Barrier => Ok(Begun::giving(vec![self.group.barrier()?], Tensor::new())),
        }
    }

    fn all_reduce(&self, input: Tensor, output: Option<Tensor>, reduce: ReduceOp) -> Result<Begun, BoxError> {
        let output = match output {
            Some(output) if output.data_ptr() == input.data_ptr() => output,
            Some(mut output) => {
                output.f_copy_(&input)?;
                output
            }
            None => duplicate(&input)?,
        };
        if output.numel() == 0 {
            return Ok(Begun::giving(Vec::new(), output));
        }
        let op = match reduce {
            ReduceOp::Sum => process_group::ReduceOp::Sum,
            ReduceOp::Product => process_group::ReduceOp::Product,
            ReduceOp::Min => process_group::ReduceOp::Min,
            ReduceOp::Max => process_group::ReduceOp::Max,
        };
        if self.is_gloo() && memory::is_half(output.kind()) {
            let wide = output.f_to_kind(Kind::Float)?;
            let work = self.group.all_reduce(&wide, op)?;
            return Ok(Begun::new(vec![work], move || {
                let mut output = output;
                output.f_copy_(&wide)?;
                Ok(output)
            }));
        }
        Ok(Begun::giving(vec![self.group.all_reduce(&output, op)?], output))
    }

    fn all_gather(&self, call: &Call, input: Tensor, output: Option<Tensor>, parts: &Cut) -> Result<Begun, BoxError> {
        let output = self.output(call, output)?;
        if output.numel() == 0 {
            return Ok(Begun::giving(Vec::new(), output));
        }
        let longest = parts.sizes.iter().copied().max().unwrap_or(0);
        let even = longest * self.members.size() as i64;
        if even == parts.total() && is_outermost(&call.shape, parts.axis) {
            let work = self.group.all_gather_into(&bytes(&output)?, &bytes(&input)?)?;
            return Ok(Begun::giving(vec![work], output));
        }
        let shapes = parts.sizes.iter().map(|&size| with_length(&call.shape, parts.axis, size));
        let shapes: Vec<Vec<i64>> = shapes.collect();
        if even * 100 <= parts.total() * PADDING_PERCENT {
            let others: i64 = call.shape.iter().enumerate().filter(|(i, _)| *i != parts.axis).map(|(_, n)| n).product();
            let padded = Tensor::f_empty([longest * others], (call.kind, self.device))?;
            padded.f_narrow(0, 0, input.numel() as i64)?.f_copy_(&input.f_view([-1])?)?;
            let all = Tensor::f_empty([shapes.len() as i64, longest * others], (call.kind, self.device))?;
            let work = self.group.all_gather_into(&bytes(&all)?, &bytes(&padded)?)?;
            let axis = parts.axis as i64;
            return Ok(Begun::new(vec![work], move || {
                let pieces = shapes.iter().enumerate().map(|(rank, shape)| {
                    let flat = all.f_select(0, rank as i64)?;
                    flat.f_narrow(0, 0, shape.iter().product())?.f_view(shape.as_slice())
                });
                Tensor::f_cat_out(&output, &pieces.collect::<Result<Vec<_>, _>>()?, axis)
            }));
        }
        let mut pieces = Vec::with_capacity(shapes.len());
        let mut works = Vec::new();
        for (rank, shape) in shapes.iter().enumerate() {
            let piece = match rank == self.members.index() {
                true => input.shallow_clone(),
                false => Tensor::f_empty(shape, (call.kind, self.device))?,
            };
            if parts.sizes[rank] > 0 {
                works.push(self.group.broadcast(&bytes(&piece)?, rank)?);
            }
            pieces.push(piece);
        }
        let axis = parts.axis as i64;
        Ok(Begun::new(works, move || Tensor::f_cat_out(&output, &pieces, axis)))
    }

    fn reduce_scatter(
        &self,
        call: &Call,
        input: Tensor,
        output: Option<Tensor>,
        parts: &Cut,
    ) -> Result<Begun, BoxError> {
        let output = self.output(call, output)?;
        if input.numel() == 0 {
            return Ok(Begun::giving(Vec::new(), output));
        }
        if !self.is_gloo() {
            let slices = slices(&input, parts)?;
            let work = self.group.reduce_scatter(&output, &slices, process_group::ReduceOp::Sum)?;
            return Ok(Begun::giving(vec![work], output));
        }
        let own = output.size();
        let arriving = vec![own.clone(); self.members.size()];
        let (work, arrived) = self.exchange(call, &input, parts, &arriving)?;
        Ok(Begun::new(vec![work], move || {
            memory::combine(&[output.shallow_clone()], &pieces(&arrived, &arriving)?, ReduceOp::Sum)?;
            Ok(output)
        }))
    }

    fn all_to_all(
        &self,
        call: &Call,
        input: Tensor,
        output: Option<Tensor>,
        split: &Cut,
        concat: &Cut,
    ) -> Result<Begun, BoxError> {
        let output = self.output(call, output)?;
        let kept = with_length(&call.shape, split.axis, split.sizes[self.members.index()]);
        let arriving: Vec<_> = concat.sizes.iter().map(|&size| with_length(&kept, concat.axis, size)).collect();
        let (work, arrived) = self.exchange(call, &input, split, &arriving)?;
        let axis = concat.axis as i64;
        Ok(Begun::new(vec![work], move || Tensor::f_cat_out(&output, &pieces(&arrived, &arriving)?, axis)))
    }

    /// Sends the parts of `input` to their ranks; gives where pieces of the shapes `arriving` will lie one after the
    /// other.
    fn exchange(
        &self,
        call: &Call,
        input: &Tensor,
        split: &Cut,
        arriving: &[Vec<i64>],
    ) -> Result<(process_group::Work, Tensor), BoxError> {
        let leaving = match is_outermost(&call.shape, split.axis) {
            true => input.f_view([-1])?,
            false => {
                let flat = slices(input, split)?.into_iter().map(|slice| slice.f_view([-1]));
                Tensor::f_cat(&flat.collect::<Result<Vec<_>, _>>()?, 0)?
            }
        };
        let width = call.kind.elt_size_in_bytes() as i64;
        let sent = split.sizes.iter().map(|&size| with_length(&call.shape, split.axis, size));
        let sent: Vec<i64> = sent.map(|shape| shape.iter().product::<i64>() * width).collect();
        let received: Vec<i64> = arriving.iter().map(|shape| shape.iter().product::<i64>() * width).collect();
        let arrived = Tensor::f_empty([received.iter().sum::<i64>() / width], (call.kind, self.device))?;
        let work = self.group.all_to_all(&bytes(&arrived)?, &bytes(&leaving)?, &received, &sent)?;
        Ok((work, arrived))
    }

    fn output(&self, call: &Call, output: Option<Tensor>) -> Result<Tensor, TchError> {
        match output {
            Some(output) => Ok(output),
            None => Tensor::f_empty(call.output_shape(self.members.index()), (call.kind, self.device)),
        }
    }

    fn is_gloo(&self) -> bool {
        self.device == Device::Cpu
    }

    /// How long to wait for a work. On CUDA a wait is the stream's, not this thread's, and NCCL's own watchdog ends it.
    fn patience(&self) -> Option<Duration> {
        self.is_gloo().then(|| self.witness.timeout())
    }

    /// Compares what all ranks are about to call.
    fn verify(&self, sequence: u64, call: &Call) -> Result<()> {
        let mut signature = call.signature().into_bytes();
        signature.resize(SIGNATURE, b' ');
        let gather = || -> Result<Vec<u8>, BoxError> {
            let own = Tensor::f_from_slice(&signature)?.f_to_device(self.device)?;
            let all = Tensor::f_empty([(SIGNATURE * self.members.size()) as i64], (Kind::Uint8, self.device))?;
            self.group.all_gather_into(&all, &own)?.wait(self.patience())?;
            Ok(Vec::<u8>::try_from(&all.f_to_device(Device::Cpu)?)?)
        };
        let all = gather().map_err(|error| self.witness.explain(call, sequence, error))?;
        let theirs = |index: usize| &all[index * SIGNATURE..(index + 1) * SIGNATURE];
        let Some(other) = (0..self.members.size()).find(|&index| theirs(index) != signature) else {
            return Ok(());
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        Err(Error::Mismatch {
            group: self.members.name().to_string(),
            sequence,
            rank: self.members.rank(),
            called: text(&signature),
            other: self.members.ranks()[other],
            other_called: text(theirs(other)),
        })
    }
}

impl Transport for C10d {
    fn waits_at_start(&self) -> bool {
        self.verify
    }

    fn start(&self, sequence: u64, call: Call, buffers: Buffers) -> Result<Box<dyn Work>> {
        let op = call.op();
        if self.verify && !op.is_point_to_point() {
            self.verify(sequence, &call)?;
        }
        let donated = buffers.donated;
        let begun = self.begin(&call, buffers).map_err(|error| self.witness.explain(&call, sequence, error))?;
        let (patience, witness) = (self.patience(), self.witness.clone());
        let under_way = UnderWay { begun, call, sequence, patience, witness };
        if donated && op == Op::Send {
            let Begun(works, _) = under_way.begun;
            self.outbox.post(works);
            return Ok(Box::new(UnderWay { begun: Begun::giving(Vec::new(), Tensor::new()), ..under_way }));
        }
        Ok(Box::new(under_way))
    }
}

struct UnderWay {
    begun: Begun,
    call: Call,
    sequence: u64,
    patience: Option<Duration>,
    witness: Witness,
}

impl Work for UnderWay {
    fn is_done(&self) -> bool {
        self.begun.0.iter().all(process_group::Work::is_completed)
    }

    fn wait(self: Box<Self>) -> Result<Tensor> {
        let UnderWay { begun: Begun(works, finish), call, sequence, patience, witness } = *self;
        let waited = works.iter().try_for_each(|work| work.wait(patience)).map_err(BoxError::from);
        let _no_grad = tch::no_grad_guard();
        waited.and_then(|()| finish()).map_err(|error| witness.explain(&call, sequence, error))
    }
}

/// The same memory as a row of bytes: what moves needs no type, and Gloo does not know them all.
fn bytes(tensor: &Tensor) -> Result<Tensor, TchError> {
    // A contiguous tensor of one element may have any stride, which only `as_strided` mends.
    tensor.f_as_strided([tensor.numel() as i64], [1], None)?.f_view_dtype(Kind::Uint8)
}

/// Whether slices along the axis are contiguous, one after the other.
fn is_outermost(shape: &[i64], axis: usize) -> bool {
    shape[..axis].iter().all(|&length| length == 1)
}

fn with_length(shape: &[i64], axis: usize, length: i64) -> Vec<i64> {
    let mut shape = shape.to_vec();
    shape[axis] = length;
    shape
}

/// The parts of a cut, contiguous each.
fn slices(tensor: &Tensor, cut: &Cut) -> Result<Vec<Tensor>, TchError> {
    let slice = |rank| tensor.f_narrow(cut.axis as i64, cut.offset(rank), cut.sizes[rank])?.f_contiguous();
    (0..cut.sizes.len()).map(slice).collect()
}

/// Pieces of these shapes that lie one after the other.
fn pieces(flat: &Tensor, shapes: &[Vec<i64>]) -> Result<Vec<Tensor>, TchError> {
    let mut offset = 0;
    let piece = |shape: &Vec<i64>| {
        let length: i64 = shape.iter().product();
        offset += length;
        flat.f_narrow(0, offset - length, length)?.f_view(shape.as_slice())
    };
    shapes.iter().map(piece).collect()
}
