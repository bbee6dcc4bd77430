//! The ranks that one rank communicates with along a view of the mesh.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::{Device, Kind, TchError, Tensor};

use crate::call::{Call, Collective, Cut};
use crate::{Buffers, Members, Op, Pending, Recorder, Result, Transport};

/// A group of ranks. Clones share one sequence of collectives.
///
/// Every rank of the group calls the same collectives in the same order. A group of size 1 is the identity of every
/// collective: it gives back the tensor that it was given (sharing its storage), records nothing and costs nothing.
/// In larger groups a result shares memory neither with the input nor with other ranks, unless the method says so.
///
/// Inputs need not be contiguous (a copy is made if they are not), must lie on the group's [device](Group::device), and
/// are read without regard to autograd; the differentiable forms are those that end in `_autograd`.
#[derive(Clone, Debug)]
pub struct Group(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    members: Members,
    device: Device,
    /// Absent exactly in groups of size 1.
    transport: Option<Arc<dyn Transport>>,
    recorder: Recorder,
    collectives: AtomicU64,
    /// Messages to and from each member, by group rank.
    sent: Box<[AtomicU64]>,
    received: Box<[AtomicU64]>,
}

impl Group {
    /// A group that communicates over `transport`. Without one it must have a single member.
    pub(crate) fn new(
        members: Members,
        device: Device,
        transport: Option<Arc<dyn Transport>>,
        recorder: Recorder,
    ) -> Self {
        debug_assert_eq!(transport.is_none(), members.size() == 1);
        let counters = || (0..members.size()).map(|_| AtomicU64::new(0)).collect();
        let (collectives, sent, received) = (AtomicU64::new(0), counters(), counters());
        Group(Arc::new(Inner { members, device, transport, recorder, collectives, sent, received }))
    }

    /// A group of one rank, the identity of every collective: for code that takes a group where there is no mesh.
    pub fn single(device: Device) -> Self {
        let members = Members::new("none", &[0], 0).expect("0 is the index of the only member");
        Group::new(members, device, None, Recorder::new(0))
    }

    /// This rank's place in the group, from 0 to one less than the size.
    pub fn rank(&self) -> usize {
        self.0.members.index()
    }

    /// How many ranks the group has.
    pub fn size(&self) -> usize {
        self.0.members.size()
    }

    /// The name of the group's view, such as `tp`; all groups of one view share it.
    pub fn name(&self) -> &str {
        self.0.members.name()
    }

    /// The world ranks of the members, in group order.
    pub fn ranks(&self) -> &[usize] {
        self.0.members.ranks()
    }

    /// The device that its tensors lie on.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// The recorder of this rank, which all its groups share.
    pub fn recorder(&self) -> &Recorder {
        &self.0.recorder
    }

    /// How many collectives this rank has started in the group; sends and receives do not count.
    pub fn entered(&self) -> u64 {
        self.0.collectives.load(Ordering::Relaxed)
    }

    pub(crate) fn members(&self) -> &Members {
        &self.0.members
    }

    /// Whether there is nobody to communicate with.
    pub(crate) fn is_single(&self) -> bool {
        self.0.transport.is_none()
    }

    /// Starts a call on prepared tensors. Not for groups of size 1.
    pub(crate) fn start<T>(
        &self,
        call: Call,
        buffers: Buffers,
        finish: impl FnOnce(Tensor) -> Result<T> + Send + 'static,
    ) -> Result<Pending<T>> {
        let inner = &*self.0;
        let transport = inner.transport.as_ref().expect("single groups return before they start anything");
        let counter = match call.what {
            Collective::Send { to } => &inner.sent[to],
            Collective::Recv { from } => &inner.received[from],
            _ => &inner.collectives,
        };
        let sequence = counter.fetch_add(1, Ordering::Relaxed);
        let mut ticket = inner.recorder.issue(&inner.members, sequence, &call);
        if transport.waits_at_start() {
            ticket.wait();
        }
        match transport.start(sequence, call, buffers) {
            Ok(work) => Ok(Pending::flying(work, ticket, finish)),
            Err(error) => {
                ticket.fail(&error);
                Err(error)
            }
        }
    }

    /// Starts a call that brings a tensor and gives a new one.
    pub(crate) fn start_new(&self, what: Collective, input: &Tensor) -> Result<Pending<Tensor>> {
        self.start_with(what, input, None, Ok)
    }

    /// Starts a call that brings a tensor, and writes into `output` if there is one.
    pub(crate) fn start_with<T>(
        &self,
        what: Collective,
        input: &Tensor,
        output: Option<Tensor>,
        finish: impl FnOnce(Tensor) -> Result<T> + Send + 'static,
    ) -> Result<Pending<T>> {
        let mut call = Call { what, shape: Vec::new(), kind: Kind::Float };
        let input = self.prepare(call.op(), input)?;
        call.shape = input.size();
        call.kind = input.kind();
        self.check_kind(&call)?;
        if let Some(output) = &output {
            self.check_output(&call, output)?;
        }
        self.start(call, Buffers { input: Some(input), output, donated: false }, finish)
    }

    /// Starts a call that brings `input` and writes into `output`. A group of size 1 copies.
    pub(crate) fn start_into(&self, what: Collective, output: &mut Tensor, input: &Tensor) -> Result<Pending<()>> {
        let call = Call { what, shape: input.size(), kind: input.kind() };
        let op = call.op();
        self.check_output(&call, output)?;
        // `data` is the same storage with a version counter of its own.
        let mut raw = output.f_data().map_err(|error| self.members().backend(op, error))?;
        if self.is_single() {
            let copied = self.prepare(op, input)?;
            raw.f_copy_(&copied).map_err(|error| self.members().backend(op, error))?;
            return Ok(Pending::ready(()));
        }
        self.start_with(call.what, input, Some(raw), |_| Ok(()))
    }

    /// Starts a call whose result replaces the tensor that it brings.
    pub(crate) fn start_in_place(&self, what: Collective, tensor: &mut Tensor) -> Result<Pending<()>> {
        if self.is_single() {
            return Ok(Pending::ready(()));
        }
        let op = Call { what: what.clone(), shape: Vec::new(), kind: Kind::Uint8 }.op();
        let members = self.members().clone();
        let mut raw = tensor.f_data().map_err(|error| members.backend(op, error))?;
        if raw.is_contiguous() {
            let output = Some(raw.shallow_clone());
            return self.start_with(what, &raw, output, |_| Ok(()));
        }
        self.start_with(what, tensor, None, move |output| {
            raw.f_copy_(&output).map_err(|error| members.backend(op, error))
        })
    }

    /// The tensor as a backend wants it: on the group's device, contiguous, unknown to autograd.
    pub(crate) fn prepare(&self, op: Op, tensor: &Tensor) -> Result<Tensor> {
        let members = self.members();
        let device = tensor.device();
        if device != self.0.device {
            let reason = format!("the tensor is on {device:?}, but the group is on {:?}", self.0.device);
            return Err(members.argument(op, reason));
        }
        tensor.f_kind().map_err(|error| members.backend(op, error))?;
        tensor.f_detach().and_then(|tensor| tensor.f_contiguous()).map_err(|error| members.backend(op, error))
    }

    /// Refuses to combine what not every backend can: what remains are numbers of 8 (integers) to 64 bits.
    fn check_kind(&self, call: &Call) -> Result<()> {
        use Kind::{BFloat16, Double, Float, Half, Int, Int8, Int64, Uint8};
        let combines = matches!(call.op(), Op::AllReduce | Op::ReduceScatter);
        if combines && !matches!(call.kind, BFloat16 | Double | Float | Half | Int | Int8 | Int64 | Uint8) {
            let reason = format!("values of {:?} cannot be combined; convert them to a number that adds up", call.kind);
            return Err(self.members().argument(call.op(), reason));
        }
        Ok(())
    }

    fn check_output(&self, call: &Call, output: &Tensor) -> Result<()> {
        let (needed, found) = (call.output_shape(self.rank()), output.size());
        let reason = if found != needed {
            format!("the output has shape {found:?}, but the result has {needed:?}")
        } else if output.kind() != call.kind {
            format!("the output is of {:?}, but the result of {:?}", output.kind(), call.kind)
        } else if output.device() != self.0.device {
            format!("the output is on {:?}, but the group is on {:?}", output.device(), self.0.device)
        } else if !output.is_contiguous() {
            "the output is not contiguous".to_owned()
        } else {
            return Ok(());
        };
        Err(self.members().argument(call.op(), reason))
    }

    /// The cut of `axis` into equal parts, one per rank.
    pub(crate) fn even_cut(&self, op: Op, shape: &[i64], axis: usize) -> Result<Cut> {
        let (length, size) = (self.axis_length(op, shape, axis)?, self.size() as i64);
        if length % size != 0 {
            let reason = format!(
                "axis {axis} of shape {shape:?} is not divisible by {size} ranks; use the uneven form with one size a rank"
            );
            return Err(self.members().argument(op, reason));
        }
        Ok(Cut { axis, sizes: vec![length / size; self.size()] })
    }

    /// The cut of `axis` into parts of `sizes`, which must be as long as it.
    pub(crate) fn whole_cut(&self, op: Op, shape: &[i64], axis: usize, sizes: &[usize]) -> Result<Cut> {
        let length = self.axis_length(op, shape, axis)?;
        let cut = self.cut(op, axis, sizes)?;
        if cut.total() != length {
            let reason = format!(
                "the sizes {sizes:?} add up to {}, but axis {axis} of shape {shape:?} is {length}",
                cut.total()
            );
            return Err(self.members().argument(op, reason));
        }
        Ok(cut)
    }

    /// The cut of which `shape` holds this rank's part along `axis`.
    pub(crate) fn own_cut(&self, op: Op, shape: &[i64], axis: usize, sizes: &[usize]) -> Result<Cut> {
        let length = self.axis_length(op, shape, axis)?;
        let cut = self.cut(op, axis, sizes)?;
        let own = cut.sizes[self.rank()];
        if own != length {
            let rank = self.rank();
            let reason = format!(
                "the sizes {sizes:?} say {own} for group rank {rank}, but axis {axis} of its shape {shape:?} is {length}"
            );
            return Err(self.members().argument(op, reason));
        }
        Ok(cut)
    }

    /// The cuts of an exchange, even without `sizes`, which are those of the split and those of the concatenation.
    pub(crate) fn exchange_cuts(
        &self,
        shape: &[i64],
        split_axis: usize,
        concat_axis: usize,
        sizes: Option<(&[usize], &[usize])>,
    ) -> Result<(Cut, Cut)> {
        let op = Op::AllToAll;
        let Some((split_sizes, concat_sizes)) = sizes else {
            let split = self.even_cut(op, shape, split_axis)?;
            if split_axis == concat_axis {
                return Ok((split.clone(), split));
            }
            let length = self.axis_length(op, shape, concat_axis)?;
            return Ok((split, Cut { axis: concat_axis, sizes: vec![length; self.size()] }));
        };
        let split = self.whole_cut(op, shape, split_axis, split_sizes)?;
        if split_axis != concat_axis {
            return Ok((split, self.own_cut(op, shape, concat_axis, concat_sizes)?));
        }
        let concat = self.cut(op, concat_axis, concat_sizes)?;
        let rank = self.rank();
        if split.sizes[rank] != concat.sizes[rank] {
            let (leaving, staying) = (split.sizes[rank], concat.sizes[rank]);
            let reason =
                format!("the part that stays on this rank is {leaving} in split_sizes, {staying} in concat_sizes");
            return Err(self.members().argument(op, reason));
        }
        Ok((split, concat))
    }

    /// One size per rank along `axis`, whatever they add up to.
    pub(crate) fn cut(&self, op: Op, axis: usize, sizes: &[usize]) -> Result<Cut> {
        if sizes.len() != self.size() {
            let reason =
                format!("{} sizes were given for a group of {} ranks: give one a rank", sizes.len(), self.size());
            return Err(self.members().argument(op, reason));
        }
        let sizes = sizes.iter().map(|&size| i64::try_from(size)).collect::<Result<Vec<_>, _>>();
        match sizes {
            Ok(sizes) if sizes.iter().try_fold(0_i64, |sum, &size| sum.checked_add(size)).is_some() => {
                Ok(Cut { axis, sizes })
            }
            _ => Err(self.members().argument(op, "the sizes add up to more than any axis can hold")),
        }
    }

    pub(crate) fn axis_length(&self, op: Op, shape: &[i64], axis: usize) -> Result<i64> {
        shape.get(axis).copied().ok_or_else(|| {
            self.members().argument(op, format!("there is no axis {axis} in a tensor of shape {shape:?}"))
        })
    }

    /// Refuses a rank outside the group, and itself as a peer.
    pub(crate) fn check_rank(&self, op: Op, rank: usize) -> Result<()> {
        let size = self.size();
        if rank >= size {
            return Err(self.members().argument(op, format!("there is no rank {rank} in a group of {size}")));
        }
        if op.is_point_to_point() && rank == self.rank() {
            return Err(self.members().argument(op, format!("group rank {rank} is this rank itself")));
        }
        Ok(())
    }
}

/// A contiguous copy that shares no storage with `tensor`, which is contiguous.
pub(crate) fn duplicate(tensor: &Tensor) -> Result<Tensor, TchError> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
