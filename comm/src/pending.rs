//! A collective under way, as a value that must be resolved.

use std::fmt;

use tch::Tensor;

use crate::recorder::Ticket;
use crate::{Result, Work};

/// The result of a collective that has been started: only [`Pending::wait`] gives it.
///
/// Several can be in flight; they may be waited for in any order. Until `wait` has returned, the tensor that was given
/// to the collective must not be changed. One that is dropped without being waited for is logged and recorded as such;
/// the collective still counts, and the other ranks get their results, so its tensor must stay unchanged until some
/// later collective of the same group has been waited for.
#[must_use = "a started collective gives its result only through `wait`"]
pub struct Pending<T>(Option<State<T>>);

enum State<T> {
    /// Nothing to wait for.
    Ready(Result<T>),
    /// Other ranks take part.
    Flying { work: Box<dyn Work>, finish: Box<dyn FnOnce(Tensor) -> Result<T> + Send>, ticket: Ticket },
}

impl<T> Pending<T> {
    /// A result that is there already, such as that of a group of size 1.
    pub fn ready(value: T) -> Self {
        Pending(Some(State::Ready(Ok(value))))
    }

    pub(crate) fn flying(
        work: Box<dyn Work>,
        ticket: Ticket,
        finish: impl FnOnce(Tensor) -> Result<T> + Send + 'static,
    ) -> Self {
        Pending(Some(State::Flying { work, finish: Box::new(finish), ticket }))
    }

    /// Whether [`Pending::wait`] would return without waiting for another rank. May be pessimistic.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            Some(State::Flying { work, .. }) => work.is_done(),
            _ => true,
        }
    }

    /// Waits for the end, and gives the result.
    ///
    /// # Errors
    /// [`crate::Error::Timeout`], [`crate::Error::PeerFailed`], [`crate::Error::Mismatch`], [`crate::Error::Backend`].
    pub fn wait(mut self) -> Result<T> {
        let state = self.0.take().expect("it is taken only here and in `map`, which both consume the value");
        match state {
            State::Ready(value) => value,
            State::Flying { work, finish, mut ticket } => {
                ticket.wait();
                let ended = work.wait().and_then(finish);
                match &ended {
                    Ok(_) => ticket.finish(),
                    Err(error) => ticket.fail(error),
                }
                ended
            }
        }
    }

    /// Does something with the result: on the thread that waits, once it is waited for, or now if it is there already.
    pub fn map<U>(mut self, then: impl FnOnce(T) -> Result<U> + Send + 'static) -> Pending<U>
    where
        T: 'static,
    {
        let state = self.0.take().expect("it is taken only here and in `wait`, which both consume the value");
        match state {
            State::Ready(value) => Pending(Some(State::Ready(value.and_then(then)))),
            State::Flying { work, finish, ticket } => {
                Pending::flying(work, ticket, move |output| finish(output).and_then(then))
            }
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(State::Flying { ticket, .. }) = self.0.take() {
            tracing::warn!("{} was dropped without being waited for", ticket.what());
            ticket.drop_unwaited();
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(State::Flying { ticket, work, .. }) => {
                f.debug_struct("Pending").field("what", &ticket.what()).field("done", &work.is_done()).finish()
            }
            _ => f.write_str("Pending(ready)"),
        }
    }
}
