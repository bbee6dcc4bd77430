//! Which tensor of Hugging Face's Llama is which of ours, and how the rows of two of them are ordered.

use std::ops::Range;

use super::Config;

/// A tensor of a Llama.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub(super) ours: String,
    pub(super) theirs: String,
    pub(super) shape: Vec<usize>,
    /// The order of its rows, where that is another.
    pub(super) rotary: Option<Rotary>,
}

impl Config {
    /// The tensors of the model, in the order of its layers.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        let (dim, vocab) = (self.dim, self.vocab_size);
        let one = |ours: &str, theirs: &str, shape: &[usize]| Entry {
            ours: format!("{ours}.weight"),
            theirs: format!("{theirs}.weight"),
            shape: shape.to_vec(),
            rotary: None,
        };
        let head = (!self.tied_embeddings).then(|| one("output", "lm_head", &[vocab, dim]));
        std::iter::once(one("tok_embeddings", "model.embed_tokens", &[vocab, dim]))
            .chain((0..self.n_layers).flat_map(move |layer| self.block(layer)))
            .chain(std::iter::once(one("norm", "model.norm", &[dim])))
            .chain(head)
    }

    fn block(&self, layer: usize) -> [Entry; 9] {
        let (dim, hidden) = (self.dim, self.hidden_dim);
        let kv = self.n_kv_heads * self.head_dim();
        let rotary = Some(Rotary { head_dim: self.head_dim() });
        [
            ("attention.wq", "self_attn.q_proj", vec![dim, dim], rotary),
            ("attention.wk", "self_attn.k_proj", vec![kv, dim], rotary),
            ("attention.wv", "self_attn.v_proj", vec![kv, dim], None),
            ("attention.wo", "self_attn.o_proj", vec![dim, dim], None),
            ("feed_forward.w1", "mlp.gate_proj", vec![hidden, dim], None),
            ("feed_forward.w2", "mlp.down_proj", vec![dim, hidden], None),
            ("feed_forward.w3", "mlp.up_proj", vec![hidden, dim], None),
            ("attention_norm", "input_layernorm", vec![dim], None),
            ("ffn_norm", "post_attention_layernorm", vec![dim], None),
        ]
        .map(|(ours, theirs, shape, rotary)| Entry {
            ours: format!("layers.{layer}.{ours}.weight"),
            theirs: format!("model.layers.{layer}.{theirs}.weight"),
            shape,
            rotary,
        })
    }
}

/// The rotary embedding turns features in pairs. Ours are neighbours, as in the Llama that Meta published; in
/// `transformers`, feature `i` of a head pairs with feature `i + head_dim / 2`. So the rows of the query's and the key's
/// projection are in another order within each head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rotary {
    /// Features of a head, an even number.
    pub(super) head_dim: usize,
}

impl Rotary {
    /// Where row `theirs` of a Hugging Face tensor is in ours.
    pub(super) fn ours(self, theirs: usize) -> usize {
        let (head, within) = (theirs - theirs % self.head_dim, theirs % self.head_dim);
        let half = self.head_dim / 2;
        head + 2 * (within % half) + within / half
    }

    /// The runs of their rows that are these rows of ours, each of at most `limit` rows, or one head.
    pub(super) fn runs(self, ours: Range<usize>, limit: usize) -> Vec<Range<usize>> {
        let half = self.head_dim / 2;
        let (mut row, mut runs) = (ours.start, Vec::new());
        while row < ours.end {
            let within = row % self.head_dim;
            let heads = (ours.end - row) / self.head_dim;
            if within == 0 && heads > 0 {
                let rows = heads.min((limit / self.head_dim).max(1)) * self.head_dim;
                runs.push(row..row + rows);
                row += rows;
            } else {
                // Of a part of a head, the even rows are one run and the odd ones another.
                let head = row - within;
                let end = ours.end.min(head + self.head_dim) - head;
                let even = within.div_ceil(2)..end.div_ceil(2);
                let odd = within / 2..end / 2;
                runs.extend([even.start + head..even.end + head, odd.start + half + head..odd.end + half + head]);
                row = head + end;
            }
        }
        runs.retain(|run| !run.is_empty());
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_the_rows_that_were_asked_for(
            half in 1_usize..5, heads in 1_usize..6, a in 0_usize..60, b in 0_usize..60, limit in 1_usize..30
        ) {
            let rotary = Rotary { head_dim: 2 * half };
            let rows = 2 * half * heads;
            let ours = a.min(b).min(rows)..a.max(b).min(rows);
            let runs = rotary.runs(ours.clone(), limit);
            prop_assert!(runs.iter().all(|run| !run.is_empty() && run.len() <= limit.max(2 * half)));
            let mut found: Vec<_> = runs.into_iter().flatten().map(|row| rotary.ours(row)).collect();
            found.sort_unstable();
            prop_assert_eq!(found, ours.collect::<Vec<_>>());
        }
    }
}
