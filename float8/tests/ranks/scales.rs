//! Scales and weights: what a layout may not change, and what of weights travels.

use std::collections::BTreeMap;

use ferrotitan_float8::comm::{DeviceMesh, Op};
use ferrotitan_float8::nn::Materialize;
use ferrotitan_float8::nn::llama::build;
use ferrotitan_float8::nn::mesh::{Mesh, View};
use ferrotitan_float8::tch::{Device, Kind, Tensor, no_grad};
use ferrotitan_float8::{Format, Options, Recipe, cast, quantize};

use crate::support::{Rank, batch, config, degrees, on, part, rank, run, step};

/// In fp64, where nothing but a scale or a cast that depends on the layout could make a difference.
#[test]
fn the_layout_changes_neither_scales_nor_products() {
    let options = |recipe| Options { global_activation_scales: true, ..Options::of(recipe) };
    let delayed = Options { delayed: Some(2), ..Options::default() };
    let sent = Options { enable_fsdp_float8_all_gather: true, ..options(Recipe::Tensorwise) };
    // The head as well, whose outputs tensor parallelism splits with the loss.
    let all =
        [Recipe::Tensorwise, Recipe::Rowwise].map(|recipe| Options { filter_fqns: Vec::new(), ..options(recipe) });
    for options in Recipe::ALL.map(options).into_iter().chain([delayed, sent]).chain(all) {
        let steps = if options.delayed.is_some() { 2 } else { 1 };
        let outcome = |mesh: DeviceMesh| {
            let mut rank = rank(&mesh, &options, Kind::Double, None)?;
            let mut outcomes = (0..steps).map(|_| step(&mut rank, &mesh)).collect::<Result<Vec<_>, _>>()?;
            Ok((outcomes.remove(steps - 1), rank.float8.histories()))
        };
        let ((loss, whole), histories) = on(degrees(1, 1), outcome).remove(0);
        // Dynamic scales of the first step are the rank's own, where nobody asked for global ones.
        let meshes = if options.delayed.is_some() { vec![(1, 2)] } else { vec![(1, 2), (2, 1), (2, 2)] };
        for (dp_shard, tp) in meshes {
            for ((found, gradients), others) in on(degrees(dp_shard, tp), outcome) {
                let what = format!("{options:?} on {dp_shard} x {tp}");
                assert!((found - loss).abs() <= 1e-10 * loss.abs(), "{found} for {loss}, {what}");
                for (name, (region, gradient)) in &gradients {
                    let exact = &whole[name].1;
                    let scale = exact.abs().max().double_value(&[]);
                    let exact = part(exact, region);
                    assert_eq!(exact.size(), gradient.size());
                    let off = if exact.numel() > 0 { (exact - gradient).abs().max().double_value(&[]) } else { 0.0 };
                    assert!(off <= 1e-10 * scale, "{name} is off by {off} of {scale}, {what}");
                }
                let near = |a: &f32, b: &f32| (a - b).abs() <= 1e-6 * b;
                for (ours, theirs) in histories.values().flatten().flatten().zip(others.values().flatten().flatten()) {
                    assert!(near(ours, theirs), "{ours} {theirs}");
                }
            }
        }
    }
}

/// What one rank computes with, by name.
fn whole_weights(compute: Option<Kind>) -> BTreeMap<String, Tensor> {
    let (mut model, mesh) = (build(&config()).unwrap(), DeviceMesh::single(Device::Cpu));
    model.materialize(&Materialize { seed: 2, kind: Kind::Float, compute, device: Device::Cpu }, &mesh).unwrap();
    model.parameters().iter().map(|p| (p.name().to_owned(), p.value().unwrap().detach())).collect()
}

#[test]
fn gathered_weights_equal_the_whole_cast_at_once() {
    for (compute, ahead, power_of_two) in
        [(Some(Kind::BFloat16), false, false), (None, true, false), (Some(Kind::BFloat16), true, true)]
    {
        let options = Options {
            enable_fsdp_float8_all_gather: true,
            precompute_float8_dynamic_scale_for_fsdp: ahead,
            power_of_two,
            ..Options::default()
        };
        // Three ranks do not divide 64 rows evenly.
        for (dp_shard, tp) in [(1, 1), (3, 1), (2, 2)] {
            on(degrees(dp_shard, tp), |mesh| {
                let weights = whole_weights(compute);
                let mut rank = rank(&mesh, &options, Kind::Float, compute)?;
                rank.float8.precompute_scales()?;
                // Gathered until somebody reshards; who runs a unit waits for its gather.
                rank.fsdp.unshard_all()?;
                let _ = no_grad(|| rank.model.forward(&batch(0..1)))?;
                let converted: Vec<String> = rank.float8.converted().map(str::to_owned).collect();
                assert_eq!(converted.len(), 14);
                for parameter in
                    rank.model.parameters().iter().filter(|p| converted.iter().any(|name| name == p.name()))
                {
                    let whole = &weights[parameter.name()];
                    let quantized = quantize(whole, Format::E4m3, power_of_two).unwrap();
                    let ferrotitan_float8::Scale::Tensor(inverse) = &quantized.scale else { panic!("one scale") };
                    // The region that tensor parallelism left.
                    let layout = parameter.layout();
                    let splits = layout.splits().iter().filter(|split| !split.view.overlaps(View::FSDP)).cloned();
                    let layout =
                        ferrotitan_float8::nn::mesh::Layout::new(layout.shape(), splits.collect(), View::NONE, &[]);
                    let region = layout.unwrap().local_region(&mesh);
                    let gathered = parameter.value().unwrap().detach();
                    let expected = part(&quantized.dequantize(Kind::Float).unwrap(), &region).to_kind(gathered.kind());
                    assert!(gathered.equal(&expected), "{} on {dp_shard} x {tp}", parameter.name());
                    // The products get the very codes back.
                    let scale = ferrotitan_float8::scale_for(
                        &ferrotitan_float8::amax(whole).unwrap(),
                        Format::E4m3,
                        power_of_two,
                    );
                    let again = cast(&gathered, &scale.unwrap(), Format::E4m3).unwrap().view_dtype(Kind::Uint8);
                    assert!(again.equal(&part(&quantized.data, &region).contiguous().view_dtype(Kind::Uint8)));
                    assert_eq!(inverse.numel(), 1);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn gathered_codes_give_the_same_products_as_gathered_weights() {
    let outcome = |send: bool| {
        on(degrees(2, 1), |mesh| {
            let options = Options { enable_fsdp_float8_all_gather: send, ..Options::default() };
            step(&mut rank(&mesh, &options, Kind::Float, Some(Kind::BFloat16))?, &mesh)
        })
    };
    for ((loss, gradients), (other_loss, others)) in outcome(false).into_iter().zip(outcome(true)) {
        assert_eq!(loss, other_loss);
        for (name, (_, gradient)) in gradients {
            assert!(gradient.equal(&others[&name].1), "{name}");
        }
    }
}

#[test]
fn half_as_many_bytes_travel() {
    // A forward pass gathers every unit once.
    let sent = |send: bool| {
        on(degrees(2, 1), |mesh| {
            let options = Options { enable_fsdp_float8_all_gather: send, ..Options::default() };
            let mut rank = rank(&mesh, &options, Kind::Float, Some(Kind::BFloat16))?;
            mesh.recorder().reset();
            let _ = no_grad(|| rank.model.forward(&batch(rank.rows.clone())))?;
            let converted: Vec<_> = rank.float8.converted().map(str::to_owned).collect();
            let parameters = rank.model.parameters();
            let weights = parameters.iter().filter(|p| converted.iter().any(|name| name == p.name()));
            let own: i64 = weights.map(|weight| weight.local().unwrap().numel() as i64).sum();
            Ok((own, mesh.recorder().total("fsdp", Op::AllGather).bytes as i64))
        })
    };
    for ((own, in_bf16), (_, in_float8)) in sent(false).into_iter().zip(sent(true)) {
        // Two bytes an element become one. Where dtypes are mixed, each of a unit's 9 parts is aligned to 16 bytes.
        let saved = in_bf16 - in_float8;
        assert!(own - 2 * 10 * 16 <= saved && saved <= own, "{saved} of {own}");
    }
}

#[test]
fn one_collective_for_the_scales_of_all_weights() {
    on(degrees(2, 1), |mesh| {
        let count = || mesh.recorder().total("dp_shard+cp+tp", Op::AllReduce).count;
        let options = Options { enable_fsdp_float8_all_gather: true, ..Options::default() };
        let mut alone = rank(&mesh, &options, Kind::Float, Some(Kind::BFloat16))?;
        mesh.recorder().reset();
        let (loss, _) = step(&mut alone, &mesh)?;
        // Each of 14 weights, forward and backward; the last block is not the last unit.
        assert_eq!(count(), 2 * 14);

        let options = Options { precompute_float8_dynamic_scale_for_fsdp: true, ..options };
        let mut together = rank(&mesh, &options, Kind::Float, Some(Kind::BFloat16))?;
        mesh.recorder().reset();
        together.float8.precompute_scales()?;
        assert_eq!(count(), 1);
        assert_eq!(step(&mut together, &mesh)?.0, loss);
        assert_eq!(count(), 1);
        Ok(())
    });
}

#[test]
fn stale_scales_are_refused() {
    let failed = run(degrees(2, 1), |mesh| {
        let options = Options {
            enable_fsdp_float8_all_gather: true,
            precompute_float8_dynamic_scale_for_fsdp: true,
            ..Options::default()
        };
        let mut rank = rank(&mesh, &options, Kind::Float, None)?;
        let forward = |rank: &mut Rank| no_grad(|| rank.model.forward(&batch(rank.rows.clone())));
        rank.float8.precompute_scales()?;
        let _ = forward(&mut rank)?;
        let grow = |rank: &Rank| {
            for parameter in rank.model.parameters() {
                let _ = no_grad(|| parameter.local().unwrap().detach().multiply_(&Tensor::from(1.5_f32)));
            }
        };
        grow(&rank);
        rank.float8.precompute_scales()?;
        let _ = forward(&mut rank)?;
        grow(&rank);
        forward(&mut rank)
    });
    let message = failed.unwrap_err().to_string();
    assert!(message.contains("layers.0.") && message.contains("call precompute_scales"), "{message}");
}

#[test]
fn one_ranks_nan_is_named_on_that_rank() {
    for options in [Options::default(), Options { enable_fsdp_float8_all_gather: true, ..Options::default() }] {
        let failed = run(degrees(1, 2), |mesh| {
            let mut rank = rank(&mesh, &options, Kind::Float, None)?;
            if mesh.rank() == 1 {
                let parameters = rank.model.parameters();
                let parameter = parameters.iter().find(|p| p.name() == "layers.1.attention.wo.weight").unwrap();
                let _ = no_grad(|| parameter.local().unwrap().detach().get(0).get(0).fill_(f64::NAN));
            }
            rank.model.forward(&batch(0..4))
        });
        let message = failed.unwrap_err().to_string();
        assert!(
            message.starts_with("rank 1") && message.contains("layers.1.attention.wo.weight: the weight"),
            "{message}"
        );
    }
}

#[test]
fn a_block_is_never_cut() {
    // 4 heads of 16 on 4 ranks are 16 rows a rank, half a block.
    let failed = run(degrees(1, 4), |mesh| rank(&mesh, &Options::of(Recipe::Mxfp8), Kind::Float, None).map(drop));
    let message = failed.unwrap_err().to_string();
    assert!(message.contains("layers.0.attention.wq.weight") && message.contains("blocks of 32"), "{message}");
}
