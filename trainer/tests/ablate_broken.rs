//! A transform that is broken on purpose is noticed, and named. Of a build that lacks one all-reduce of tensor parallelism:
//! `cargo test --package ferrotitan-trainer --features broken-reduction --test ablate_broken`.
#![allow(clippy::unwrap_used)]

#[path = "support/matrix.rs"]
mod matrix;

use matrix::Matrix;

#[test]
fn a_missing_all_reduce_is_noticed_and_its_dimension_named() {
    let matrix = Matrix::new(
        r#"
        [references.single]
        tolerance = 1e-10
        [axes.fsdp]
        off = {}
        on = { parallelism.data_parallel_shard_degree = 2 }
        [axes.tp]
        off = {}
        on = { parallelism.tensor_parallel_degree = 2 }
        [axes.pp]
        off = {}
        on = { parallelism.pipeline_parallel_degree = 2 }
        "#,
    );
    let (code, out, err) = matrix.run(&[]);
    assert_eq!(code, 1, "{out}{err}");
    for cell in ["tp", "fsdp+tp", "tp+pp", "fsdp+tp+pp"] {
        assert!(out.contains(&format!("DEVIATES {cell}: loss off by")), "{cell} is not named in\n{out}");
    }
    assert!(out.contains("8 cells: 4 same, 4 deviates"), "{out}");
    assert!(out.contains("every failing cell has this, and no other cell: tp\n"), "{out}");
}
