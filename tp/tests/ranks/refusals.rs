//! Wrong plans and wrong inputs are errors that say what to change.

use crate::support::{HOW, batch, config, divided, limits, on_ranks};
use ferrotitan_comm::threads;
use ferrotitan_mesh::{Degrees, View};
use ferrotitan_nn::llama::{LlamaConfig, build};
use ferrotitan_nn::{Batch, Transform};
use ferrotitan_tp::{Options, Plan, Style, TensorParallel};
use tch::{Device, Kind, Tensor};

/// What the first rank says of a plan for a model.
fn refusal(config: &LlamaConfig, tp: usize, plan: &Plan) -> String {
    let messages = on_ranks(tp, |mesh| {
        let mut model = build(config).unwrap();
        let transform = TensorParallel::new(mesh.clone(), Options::default(), plan.clone());
        transform.apply(&mut model, &mesh).unwrap_err().to_string()
    });
    messages.into_iter().next().unwrap()
}

/// Llama's plan with entries before it.
fn amended(config: &LlamaConfig, entries: &[(&str, Style)]) -> Plan {
    let plan = Plan::llama(config);
    let rest = plan.entries().map(|(pattern, style)| (pattern.to_owned(), style));
    Plan::new(entries.iter().map(|&(pattern, style)| (pattern.to_owned(), style)).chain(rest)).unwrap()
}

fn assert_says(message: &str, words: &[&str]) {
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
}

#[test]
fn plans_that_do_not_fit_the_model() {
    let config = config(8, 4, 24, 32);
    let idle = amended(&config, &[("layers.*.attention.gate.weight", Style::Column)]);
    assert_says(&refusal(&config, 2, &idle), &["layers.*.attention.gate.weight", "tok_embeddings.weight"]);
    let short = Plan::new(Plan::llama(&config).entries().filter(|(pattern, _)| *pattern != "norm.weight")).unwrap();
    assert_says(&refusal(&config, 2, &short), &["norm.weight", "Replicated"]);
    let mixed = amended(&config, &[("layers.0.feed_forward.w1.weight", Style::Row)]);
    assert_says(&refusal(&config, 2, &mixed), &["layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight"]);
    let misplaced = amended(&config, &[("layers.0.ffn_norm.weight", Style::Column)]);
    assert_says(&refusal(&config, 2, &misplaced), &["layers.0.ffn_norm.weight", "outside every Linear seam"]);
    let table = amended(&config, &[("layers.0.ffn_norm.weight", Style::Vocabulary)]);
    assert_says(&refusal(&config, 2, &table), &["layers.0.ffn_norm.weight", "layer of its own"]);
    let axis = amended(&config, &[("layers.0.ffn_norm.weight", Style::Row)]);
    assert_says(&refusal(&config, 2, &axis), &["layers.0.ffn_norm.weight", "axis 1"]);
}

#[test]
fn a_head_is_never_split() {
    let many = config(4, 4, 24, 32);
    assert_says(&refusal(&many, 8, &Plan::llama(&many)), &["layers.0.attention.wo.weight", "use at most 4 ranks"]);
    let grouped = config(8, 2, 24, 32);
    assert_says(&refusal(&grouped, 3, &Plan::llama(&grouped)), &["attention.wq", "2 key-value heads", "3 ranks"]);
    let other = config(3, 3, 24, 32);
    assert_says(
        &refusal(&many, 2, &Plan::llama(&LlamaConfig { dim: many.dim, ..other })),
        &["attention.wq", "correct the plan's heads"],
    );
}

#[test]
fn a_model_is_divided_once() {
    let config = config(8, 4, 24, 32);
    let messages = on_ranks(2, |mesh| {
        let mut model = divided(&config, &mesh, Options::default()).unwrap();
        let again = TensorParallel::new(mesh.clone(), Options::default(), Plan::llama(&config));
        again.apply(&mut model, &mesh).unwrap_err().to_string()
    });
    assert_says(&messages[0], &["tok_embeddings.weight", "tp"]);
}

#[test]
fn a_pipeline_stage_is_divided_by_the_plan_of_the_whole() {
    let config = config(8, 4, 24, 32);
    let degrees = Degrees { pp: 2, tp: 2, ..Degrees::default() };
    let messages = threads::run(degrees, &limits(), |mesh| {
        let mut model = build(&config)?;
        let _ = model.layers_mut().split_off(2);
        TensorParallel::new(mesh.clone(), Options::default(), Plan::llama(&config)).apply(&mut model, &mesh)?;
        assert!(model.parameters().iter().any(|parameter| parameter.layout().split_view() == View::TP));
        // What no pattern matches is an error all the same.
        let silent = Plan::new([("tok_embeddings.weight", Style::Vocabulary)]).unwrap();
        let refused = TensorParallel::new(mesh.clone(), Options::default(), silent).apply(&mut build(&config)?, &mesh);
        Ok::<_, ferrotitan_nn::Error>(refused.unwrap_err().to_string())
    });
    assert_says(&messages.unwrap()[0], &["layers.0.attention.wq.weight", "says nothing"]);
}

#[test]
fn ids_outside_the_vocabulary() {
    let config = config(8, 4, 24, 32);
    on_ranks(2, |mesh| {
        let mut model = divided(&config, &mesh, Options::default()).unwrap();
        assert_says(&model.forward(&batch(1, 4, 32)).unwrap_err().to_string(), &["tok_embeddings", "materialize"]);
        model.materialize(&HOW, &mesh).unwrap();
        let ids = |last: i64| Tensor::from_slice(&[0, 31, last]).view([1, 3]);
        let mut run = |tokens, labels| model.forward(&Batch::new(tokens, Some(labels)).unwrap());
        assert_says(&run(ids(32), ids(0)).unwrap_err().to_string(), &["tok_embeddings", "first of them 32", "0 to 31"]);
        assert_says(&run(ids(-1), ids(0)).unwrap_err().to_string(), &["first of them -1"]);
        assert_says(&run(ids(0), ids(32)).unwrap_err().to_string(), &["output", "first of them 32"]);
        assert_says(&run(ids(0), ids(-1)).unwrap_err().to_string(), &["output", "first of them -1"]);
        let _ = run(ids(0), ids(-100)).unwrap();
        let flat = Tensor::zeros([3], (Kind::Int64, Device::Cpu));
        assert!(model.forward(&Batch { tokens: flat, ..batch(1, 3, 32) }).is_err());
    });
}
