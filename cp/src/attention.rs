//! Attention over a sequence that the ranks of a group share, as a differentiable function.

use std::sync::Arc;

use ferrotitan_comm::Group;
use ferrotitan_ext::BoxError;
use ferrotitan_ext::autograd::{self, Context, Function};
use ferrotitan_nn::{Operation, kept};
use tch::Tensor;

use crate::error::Context as _;
use crate::exchange::{self, Heads, Whole};
use crate::partial::{Gradients, Outputs};
use crate::{Error, Mask, Method, Plan, Result, Sharding, gather, packed, ring};

/// Scaled dot-product attention of this rank's queries over the keys and values of all ranks, softmax(q kᵀ / √features) v.
///
/// `q` is `[batch, tokens, heads, features]`, `k` and `v` are `[batch, tokens, key-value heads, features]`: the tokens
/// that the sharding gives this rank, in its order, in one floating-point dtype, on the group's device. There may be fewer
/// key-value heads than heads, whose number is then a multiple of theirs. The result has the shape and dtype of `q`.
///
/// Every rank of the group calls this, and every rank runs its backward pass. Partial results are merged, and gradients
/// added, in fp32 (fp64 for fp64). No rank holds the scores of its queries against the whole sequence; [`Method`] says
/// what else it holds. For the backward pass a layer keeps queries, keys, values and output of this rank's tokens, or of
/// [`Method::AllToAll`] of its heads.
///
/// ```
/// use ferrotitan_comm::Group;
/// use ferrotitan_cp::tch::{Device, Kind, Tensor};
/// use ferrotitan_cp::{Mask, Method, Sharding, attention};
///
/// # fn main() -> ferrotitan_cp::Result<()> {
/// let group = Group::single(Device::Cpu);
/// let sharding = Sharding::head_tail(10, group.size())?;
/// let x = Tensor::randn([1, 10, 4, 8], (Kind::Float, Device::Cpu));
/// let out = attention(&x, &x, &x, &Mask::causal(), &sharding, Method::Ring, &group)?;
/// assert_eq!(out.size(), x.size());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Shape`] when the tensors do not fit the sharding, the mask or the group; [`Error::Comm`] when a collective
/// fails; [`Error::Torch`] when libtorch does.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &Mask,
    sharding: &Sharding,
    method: Method,
    group: &Group,
) -> Result<Tensor> {
    sharding.check_group(group)?;
    let batch = q.size().first().copied().unwrap_or(0) as usize;
    let plan = Plan::new(mask, sharding, method, group.rank(), batch)?;
    planned_attention(q, k, v, &Arc::new(plan), group)
}

/// [`attention`] by a plan that was made before.
///
/// # Errors
/// As [`attention`].
pub fn planned_attention(q: &Tensor, k: &Tensor, v: &Tensor, plan: &Arc<Plan>, group: &Group) -> Result<Tensor> {
    plan.sharding.check_group(group)?;
    plan.check(&q.size(), &k.size(), &v.size())?;
    if q.kind() != k.kind() || k.kind() != v.kind() {
        return Err(Error::Shape {
            what: "attention",
            got: format!("queries in {:?}, keys in {:?}, values in {:?}", q.kind(), k.kind(), v.kind()),
            expected: "one dtype".into(),
        });
    }
    let (plan, group) = (plan.clone(), group.clone());
    let outputs = match plan.method {
        Method::Ring | Method::AllGather => autograd::apply(Keyed { plan, group }, &[q, k, v]),
        Method::AllToAll => {
            let heads = Heads::new(q.size()[2], k.size()[2], group.size());
            autograd::apply(Exchanged { plan, group, heads }, &[q, k, v])
        }
    };
    let mut outputs = outputs.map_err(|error| match error {
        // An error of this crate comes through as itself.
        ferrotitan_ext::Error::Callback { source } => match source.downcast::<Error>() {
            Ok(own) => *own,
            Err(source) => Error::Ext(ferrotitan_ext::Error::Callback { source }),
        },
        other => Error::Ext(other),
    })?;
    Ok(outputs.swap_remove(0))
}

/// Queries stay, keys and values travel.
struct Keyed {
    plan: Arc<Plan>,
    group: Group,
}

impl Keyed {
    fn attend(&self, q: &Tensor, kv: &Tensor) -> Result<(Tensor, Tensor)> {
        let q_bhsk = heads_first(q)?;
        let mut outputs = Outputs::new(&q_bhsk)?;
        match self.plan.method {
            Method::Ring => ring::forward(&mut outputs, &q_bhsk, kv, &self.plan, &self.group)?,
            _ => gather::forward(&mut outputs, &q_bhsk, kv, &self.plan, &self.group)?,
        }
        let (out_bhsk, lse) = outputs.finish(&q_bhsk)?;
        Ok((heads_first(&out_bhsk)?, lse))
    }

    fn gradients(&self, grad: &Tensor, q: &Tensor, kv: &Tensor, out: &Tensor, lse: Tensor) -> Result<[Tensor; 3]> {
        let mut gradients = Gradients::new(heads_first(grad)?, heads_first(q)?, heads_first(out)?, lse)?;
        let dkv = match self.plan.method {
            Method::Ring => ring::backward(&mut gradients, kv, &self.plan, &self.group)?,
            _ => gather::backward(&mut gradients, kv, &self.plan, &self.group)?,
        };
        let dq = heads_first(&gradients.finish())?.f_to_kind(q.kind()).context("attention's backward")?;
        let (dk, dv) = packed::unpack(&dkv, kv.kind())?;
        Ok([dq, dk, dv])
    }
}

impl Function for Keyed {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        // A rank whose output does not reach the loss still takes part backward.
        context.set_materialize_grads(true);
        let [q, k, v] = inputs else { return Err("attention takes three tensors".into()) };
        let kv = packed::pack(k, v)?;
        let mut outputs = kept(Operation::Attention, || {
            let (out, lse) = self.attend(q, &kv)?;
            Ok::<_, BoxError>(vec![out, lse])
        })?;
        context.save(&[q.shallow_clone(), kv]);
        context.save(&outputs);
        outputs.truncate(1);
        Ok(outputs)
    }

    fn backward(&mut self, context: &mut Context, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, BoxError> {
        let (saved, grad) = (context.saved()?, only(grads)?);
        let [q, kv, out, lse] = saved.as_slice() else { return Err("attention saved four tensors".into()) };
        let _no_grad = tch::no_grad_guard();
        Ok(self.gradients(&grad, q, kv, out, lse.shallow_clone())?.map(Some).into())
    }
}

/// Tokens travel, heads stay apart.
struct Exchanged {
    plan: Arc<Plan>,
    group: Group,
    heads: Heads,
}

impl Function for Exchanged {
    fn forward(&mut self, context: &mut Context, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError> {
        context.set_materialize_grads(true);
        let [q, k, v] = inputs else { return Err("attention takes three tensors".into()) };
        let mut outputs = kept(Operation::Attention, || {
            let whole = exchange::gather(q, k, v, &self.heads, &self.plan, &self.group)?;
            let (out, lse) = exchange::attend(&whole, &self.heads, &self.plan)?;
            let output = exchange::scatter(&out, &self.heads, &self.plan, &self.group)?;
            Ok::<_, BoxError>(vec![output, whole.qkv, out, lse])
        })?;
        context.save(&outputs[1..]);
        outputs.truncate(1);
        Ok(outputs)
    }

    fn backward(&mut self, context: &mut Context, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, BoxError> {
        let (saved, grad) = (context.saved()?, only(grads)?);
        let [qkv, out, lse] = saved.as_slice() else { return Err("attention saved three tensors".into()) };
        let _no_grad = tch::no_grad_guard();
        let (whole, out, lse) = (Whole { qkv: qkv.shallow_clone() }, out.shallow_clone(), lse.shallow_clone());
        let gradients = exchange::backward(&grad, &whole, out, lse, &self.heads, &self.plan, &self.group)?;
        Ok(gradients.map(Some).into())
    }
}

fn only(grads: Vec<Option<Tensor>>) -> Result<Tensor, BoxError> {
    grads.into_iter().next().flatten().ok_or_else(|| "attention has one output".into())
}

/// `[b, s, h, k]` and `[b, h, s, k]` into each other.
fn heads_first(x: &Tensor) -> Result<Tensor> {
    x.f_transpose(1, 2).context("attention")
}
