//! Tensors on their way from stage to stage.

use std::collections::HashMap;

use ferrotitan_comm::{Group, Pending};
use ferrotitan_schedule::{Message, Op, Payload};
use tch::{Kind, Tensor};

use crate::{Error, Result};

/// What one rank has sent, will send, and expects in one step.
pub(crate) struct Mail<'a> {
    group: &'a Group,
    placement: &'a [usize],
    /// Computed, but not sent.
    outgoing: HashMap<Message, Tensor>,
    /// Received, or on its way; what a stage of this rank gives to another is here at once.
    incoming: HashMap<Message, Incoming>,
    /// Tensors that must not be changed yet.
    sent: Vec<(Message, Pending<()>)>,
}

enum Incoming {
    Flying(Pending<Tensor>),
    Here(Tensor),
}

impl<'a> Mail<'a> {
    pub(crate) fn new(group: &'a Group, placement: &'a [usize]) -> Self {
        let (outgoing, incoming, sent) = (HashMap::new(), HashMap::new(), Vec::new());
        Self { group, placement, outgoing, incoming, sent }
    }

    /// Takes over what a stage has computed: for a stage of this rank, or to be sent when the schedule says so.
    pub(crate) fn put(&mut self, message: Message, tensor: Tensor) {
        if self.placement.get(message.target()) == Some(&self.group.rank()) {
            self.incoming.insert(message, Incoming::Here(tensor));
        } else {
            self.outgoing.insert(message, tensor);
        }
    }

    /// Starts to send what has been put here.
    pub(crate) fn send(&mut self, message: Message) -> Result<()> {
        let tensor = self.outgoing.remove(&message).ok_or_else(|| absent(Op::Send(message)))?;
        let to = self.placement.get(message.target()).ok_or_else(|| absent(Op::Send(message)))?;
        self.sent.push((message, self.group.send_start(&tensor, *to)?));
        self.release(|_, pending| pending.is_done())
    }

    /// Starts to receive.
    pub(crate) fn receive(&mut self, message: Message, shape: &[i64], kind: Kind) -> Result<()> {
        let from = self.placement.get(message.source).ok_or_else(|| absent(Op::Receive(message)))?;
        let pending = self.group.recv_start(shape, kind, *from)?;
        self.incoming.insert(message, Incoming::Flying(pending));
        Ok(())
    }

    /// Waits for what a stage needs, and hands it over.
    pub(crate) fn take(&mut self, message: Message) -> Result<Tensor> {
        let incoming = self.incoming.remove(&message).ok_or_else(|| absent(Op::Receive(message)))?;
        let tensor = match incoming {
            Incoming::Here(tensor) => return Ok(tensor),
            Incoming::Flying(pending) => pending.wait()?,
        };
        if message.payload == Payload::Gradient {
            // Whoever gives the gradient of activations has received them. Gloo knows of a send that it is done only
            // once it is waited for.
            let answered = Message { payload: Payload::Activation, source: message.target(), ..message };
            self.release(|message, _| *message == answered)?;
        }
        Ok(tensor)
    }

    /// Waits until everything that was sent has left.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.release(|_, _| true)
    }

    fn release(&mut self, which: impl Fn(&Message, &Pending<()>) -> bool) -> Result<()> {
        let (done, left) =
            std::mem::take(&mut self.sent).into_iter().partition(|(message, pending)| which(message, pending));
        self.sent = left;
        for (_, pending) in done {
            pending.wait()?;
        }
        Ok(())
    }
}

fn absent(op: Op) -> Error {
    Error::Absent { what: format!("the tensor of {op}") }
}
