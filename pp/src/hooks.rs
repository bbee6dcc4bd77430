//! The seam between the executor and whoever shards the stages' parameters.

use ferrotitan_comm::BoxError;

/// What is done to the parameters of a stage as the schedule comes by.
///
/// The executor calls these in the schedule's order, the same on all ranks that hold a stage. Sharded data parallelism
/// gathers a stage's parameters in `unshard`, so once a step whatever the number of microbatches, and reduces its
/// gradients in `reduce`.
pub trait StageHooks: Send {
    /// Starts to gather the parameters of a stage, which is used soon.
    ///
    /// # Errors
    /// Any, which ends the step.
    fn unshard(&mut self, stage: usize) -> Result<(), BoxError> {
        let _ = stage;
        Ok(())
    }

    /// Frees the gathered parameters of a stage, which is not used any more in this step.
    ///
    /// # Errors
    /// Any, which ends the step.
    fn reshard(&mut self, stage: usize) -> Result<(), BoxError> {
        let _ = stage;
        Ok(())
    }

    /// Starts to reduce the gradients of a stage: those of all microbatches are in, also in parameters that it shares
    /// with another stage of this rank.
    ///
    /// # Errors
    /// Any, which ends the step.
    fn reduce(&mut self, stage: usize) -> Result<(), BoxError> {
        let _ = stage;
        Ok(())
    }

    /// Ends a training step: when it returns, gradients are final but for what stages of different ranks share.
    ///
    /// # Errors
    /// Any, which ends the step.
    fn finish(&mut self) -> Result<(), BoxError> {
        Ok(())
    }
}

/// For parameters that lie whole on this rank, with gradients of this rank alone.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoHooks;

impl StageHooks for NoHooks {}
