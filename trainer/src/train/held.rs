//! What each rank holds before the first step, and the table that says so.

use ferrotitan_comm::DeviceMesh;
use ferrotitan_mesh::{Degrees, Dim, View};
use ferrotitan_nn::Parameter;
use tch::{Kind, Tensor};

use crate::metrics::in_units;

/// Parameters of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// How many.
    pub(super) parameters: u64,
    /// Their bytes.
    pub(super) bytes: u64,
}

impl Held {
    /// Bytes of the optimizer's state: AdamW's two moments of each parameter.
    fn optimizer(self) -> u64 {
        2 * self.bytes
    }

    /// Bytes of parameters, gradients and the optimizer's state.
    pub(super) fn state(self) -> u64 {
        2 * self.bytes + self.optimizer()
    }
}

/// What every rank holds, in their order. All ranks call it.
pub(super) fn by_all(parameters: &[Parameter], mesh: &DeviceMesh) -> anyhow::Result<Vec<Held>> {
    let (mut count, mut bytes) = (0, 0);
    for parameter in parameters {
        let local = parameter.local()?;
        count += local.numel() as i64;
        bytes += (local.numel() * local.kind().elt_size_in_bytes()) as i64;
    }
    let own = Tensor::from_slice(&[count, bytes]).to_device(mesh.device());
    let all = mesh.group(View::WORLD)?.all_gather(&own, 0)?.to_kind(Kind::Int64);
    let all = Vec::<i64>::try_from(&all.to_device(tch::Device::Cpu))?;
    Ok(all.chunks_exact(2).map(|pair| Held { parameters: pair[0] as u64, bytes: pair[1] as u64 }).collect())
}

/// The mesh, where its ranks are, and what they hold: a line for one rank, a few for many. Ranks of one stage are in one
/// line, which gives the least and the most that one of them holds.
pub(super) fn table(degrees: &Degrees, held: &[Held]) -> String {
    let dims: Vec<Dim> = Dim::ALL.into_iter().filter(|dim| degrees.get(*dim) > 1).collect();
    let mut lines = Vec::new();
    if !dims.is_empty() {
        let product: Vec<String> = dims.iter().map(|dim| format!("{dim} {}", degrees.get(*dim))).collect();
        lines.push(format!("{} ranks: {}", held.len(), product.join(" * ")));
    }
    for dim in &dims {
        let inner = Dim::ALL.into_iter().skip_while(|other| other != dim).skip(1);
        let stride: usize = inner.map(|dim| degrees.get(dim)).product();
        let ranks: Vec<String> = (0..degrees.get(*dim)).map(|index| (index * stride).to_string()).collect();
        let more = if ranks.len() > 8 { ", …" } else { "" };
        let shown = ranks.iter().take(8).map(String::as_str).collect::<Vec<_>>().join(", ");
        lines.push(format!("  {:<12} of rank 0: ranks {shown}{more}", dim.name()));
    }
    let stages = degrees.get(Dim::Pp);
    for (stage, held) in held.chunks(held.len().div_ceil(stages).max(1)).enumerate() {
        let first = stage * held.len();
        let mut place = match held.len() {
            1 => format!("rank {first}"),
            ranks => format!("ranks {first} to {}", first + ranks - 1),
        };
        if stages > 1 {
            place.push_str(&format!(" (pp {stage})"));
        }
        let range = |of: &dyn Fn(&Held) -> u64, word: &dyn Fn(u64) -> String| {
            let of_all = held.iter().map(of);
            let (least, most) =
                (of_all.clone().min().map_or_else(String::new, word), of_all.max().map_or_else(String::new, word));
            if least == most { most } else { format!("{least} to {most}") }
        };
        let bytes = |value: u64| in_units(value as f64);
        lines.push(format!(
            "  {place}: {} parameters, {}; optimizer {}",
            range(&|held| held.parameters, &|value| value.to_string()),
            range(&|held| held.bytes, &bytes),
            range(&|held| held.optimizer(), &bytes),
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_is_one_line_and_sixteen_are_folded() {
        let held = |parameters| Held { parameters, bytes: 4 * parameters };
        assert_eq!(table(&Degrees::default(), &[held(512)]), "  rank 0: 512 parameters, 2.0 KiB; optimizer 4.0 KiB");
        let degrees = Degrees { pp: 2, dp_shard: 2, cp: 2, tp: 2, ..Degrees::default() };
        let all: Vec<Held> = (0..16).map(|rank| held(if rank < 8 { 100 } else { 200 + rank })).collect();
        let expected = "16 ranks: pp 2 * dp_shard 2 * cp 2 * tp 2\n\
                        \x20 pp           of rank 0: ranks 0, 8\n\
                        \x20 dp_shard     of rank 0: ranks 0, 4\n\
                        \x20 cp           of rank 0: ranks 0, 2\n\
                        \x20 tp           of rank 0: ranks 0, 1\n\
                        \x20 ranks 0 to 7 (pp 0): 100 parameters, 400 B; optimizer 800 B\n\
                        \x20 ranks 8 to 15 (pp 1): 208 to 215 parameters, 832 B to 860 B; optimizer 1.6 KiB to 1.7 KiB";
        assert_eq!(table(&degrees, &all), expected);
    }
}
