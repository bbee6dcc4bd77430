//! Context parallelism alone.

use ferrotitan_comm::threads::run;
use ferrotitan_comm::{DeviceMesh, ReduceOp};
use ferrotitan_cp::{Balance, ContextOptions, ContextParallel, Method, Result};
use ferrotitan_mesh::{Degrees, View};
use ferrotitan_nn::llama::build;
use ferrotitan_nn::{Batch, Documents, Model, Transform};
use tch::{Device, Tensor};

use crate::support::{HOW, alone, batch, checkpoint_blocks, config, limits, packed};

pub(crate) fn divided(mesh: &DeviceMesh, context: &ContextParallel, checkpoint: bool) -> Model {
    let mut model = build(&config()).unwrap();
    context.apply(&mut model, mesh).unwrap();
    if checkpoint {
        checkpoint_blocks(&mut model);
    }
    model.materialize(&HOW, mesh).unwrap();
    model
}

fn parity(documents: Option<Documents>, checkpoint: bool, cases: &[(usize, Balance)]) {
    let expected = alone(&batch(documents.clone()));
    for &(ranks, balance) in cases {
        for method in Method::ALL {
            run(Degrees { cp: ranks, ..Degrees::default() }, &limits(), |mesh| -> Result<()> {
                let context = ContextParallel::new(&mesh, ContextOptions { method, balance })?;
                let local = context.shard_batch(&batch(documents.clone()))?;
                let mut model = divided(&mesh, &context, checkpoint);
                let loss = model.forward(&local).unwrap();
                loss.backward();
                let what = format!("{method}, {balance:?}, {ranks} ranks");
                expected.assert_met(&loss, &model, &mesh, Some(&mesh.group(View::LOSS)?), &what);
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn one_document_a_sequence() {
    parity(None, false, &[1, 2, 4, 8].map(|ranks| (ranks, Balance::HeadTail)));
}

#[test]
fn packed_documents() {
    parity(packed(), false, &[(2, Balance::HeadTail), (3, Balance::Contiguous), (8, Balance::Documents)]);
}

#[test]
fn recomputed_layers() {
    parity(packed(), true, &[(2, Balance::HeadTail)]);
}

#[test]
fn more_ranks_than_tokens() {
    let cut = |x: &Tensor| x.narrow(1, 0, 3);
    let short = || {
        let whole = batch(None);
        Batch::new(cut(&whole.tokens), whole.labels.as_ref().map(cut)).unwrap()
    };
    let expected = alone(&short());
    for method in Method::ALL {
        run(Degrees { cp: 5, ..Degrees::default() }, &limits(), |mesh| -> Result<()> {
            let context = ContextParallel::new(&mesh, ContextOptions { method, balance: Balance::HeadTail })?;
            let local = context.shard_batch(&short())?;
            assert!(local.tokens.size()[1] >= 1);
            let loss = divided(&mesh, &context, false).forward(&local).unwrap().double_value(&[]);
            let total = mesh.group(View::LOSS)?.all_reduce_scalar(loss, ReduceOp::Sum)?;
            assert!((total - expected.loss).abs() <= 1e-12 * expected.loss, "{total}, not {}", expected.loss);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn logits_come_back_in_order() {
    let unlabelled = || Batch { labels: None, ..batch(packed()) };
    let mut one = build(&config()).unwrap();
    one.materialize(&HOW, &DeviceMesh::single(Device::Cpu)).unwrap();
    let expected = std::sync::Mutex::new(one.forward(&unlabelled()).unwrap().detach());
    run(Degrees { cp: 4, ..Degrees::default() }, &limits(), |mesh| -> Result<()> {
        let options = ContextOptions { method: Method::AllGather, balance: Balance::Documents };
        let context = ContextParallel::new(&mesh, options)?;
        let local = context.shard_batch(&unlabelled())?;
        let logits = divided(&mesh, &context, false).forward(&local).unwrap();
        let gathered = context.gather(&logits, 1, &local)?;
        let expected = expected.lock().unwrap();
        assert_eq!(gathered.size(), expected.size());
        assert!((gathered - &*expected).abs().max().double_value(&[]) < 1e-11);
        Ok(())
    })
    .unwrap();
}
