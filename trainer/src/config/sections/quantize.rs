//! `[quantize.linear.float8]`, `[quantize.linear.mx]` and their like for grouped products.

use super::{Names, words};
use crate::config::section::section;

section! {
    /// `[quantize.linear.float8]`: Float8 for linear layers, switched on by `model.converters = ["float8"]`.
    pub struct Float8Linear {
        /// Gather sharded weights in Float8.
        pub enable_fsdp_float8_all_gather: bool = false,
        /// Compute the scales of all weights together after each step.
        pub precompute_float8_dynamic_scale_for_fsdp: bool = false,
        /// TorchTitan: compute Float8 weights again in the backward pass instead of keeping them.
        pub force_recompute_fp8_weight_in_bwd: bool = false,
        /// "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        pub recipe_name: Option<Float8Recipe> = None,
        /// Layers that stay as they are, by name; "auto_filter_small_kn" among them: those too small to gain.
        pub filter_fqns: Names = Names::default(),
        /// Compute in Float8's values without its kernels, for machines that lack them.
        pub emulate: bool = false,
        /// Ferrotitan: "dynamic" scales come of a tensor's own largest magnitude, "delayed" ones of that of the last steps.
        pub scaling: Float8Scaling = Float8Scaling::Dynamic,
        /// Ferrotitan: how many steps delayed scaling remembers.
        pub amax_history: u64 = 16,
    }
}

words! {
    /// What shares a scale in Float8.
    pub enum Float8Recipe {
        /// A whole tensor.
        Tensorwise = "tensorwise",
        /// A row.
        Rowwise = "rowwise",
        /// A row, with the weights' gradient in high precision.
        RowwiseWithGwHp = "rowwise_with_gw_hp",
    }
}

words! {
    /// What a scale is computed from.
    pub enum Float8Scaling {
        /// The tensor's own largest magnitude.
        Dynamic = "dynamic",
        /// The largest magnitude of the last steps.
        Delayed = "delayed",
    }
}

section! {
    /// `[quantize.linear.mx]`: microscaling formats for linear layers, switched on by `model.converters = ["mx"]`.
    pub struct MxLinear {
        /// TorchTitan: the kernel of one of the casts.
        pub mxfp8_dim1_cast_kernel_choice: CastKernel = CastKernel::Triton,
        /// "mxfp8_cublas", or "mxfp8_emulated" to compute in its values without its kernels. Without such a kernel the two
        /// are one.
        pub recipe_name: MxRecipe = MxRecipe::Cublas,
        /// Layers that stay as they are, by name.
        pub filter_fqns: Names = Names::of(&["output"]),
    }
}

words! {
    /// Who multiplies in a microscaling format.
    pub enum MxRecipe {
        /// The device, where it can.
        Cublas = "mxfp8_cublas",
        /// Other products, with the same numbers.
        Emulated = "mxfp8_emulated",
    }
}

words! {
    /// Who casts to a microscaling format.
    pub enum CastKernel {
        /// A Triton kernel.
        Triton = "triton",
        /// A CUDA kernel.
        Cuda = "cuda",
        /// PyTorch operations.
        Torch = "torch",
    }
}

section! {
    /// `[quantize.grouped_mm.float8]`: Float8 for the experts of a mixture.
    pub struct Float8GroupedMm {
        /// The layers, by name.
        pub fqns: Names = Names::default(),
    }
}

section! {
    /// `[quantize.grouped_mm.mx]`: microscaling formats for the experts of a mixture.
    pub struct MxGroupedMm {
        /// The recipe.
        pub recipe_name: String = "mxfp8".into(),
        /// The layers, by name.
        pub fqns: Names = Names::default(),
    }
}

section! {
    /// `[quantize.linear]`.
    pub struct QuantizedLinear {
        /// Float8.
        pub float8: Float8Linear,
        /// Microscaling formats.
        pub mx: MxLinear,
    }
}

section! {
    /// `[quantize.grouped_mm]`.
    pub struct QuantizedGroupedMm {
        /// Float8.
        pub float8: Float8GroupedMm,
        /// Microscaling formats.
        pub mx: MxGroupedMm,
    }
}

section! {
    /// `[quantize]`: products in fewer bits.
    pub struct Quantize {
        /// Linear layers.
        pub linear: QuantizedLinear,
        /// The experts of a mixture.
        pub grouped_mm: QuantizedGroupedMm,
    }
}
