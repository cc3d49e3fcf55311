//! Gradients of parameters that losses add to in place.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use crate::{Upload, UploadSlice, Uploaded};

/// The gradient of an embedding: N addends of U distinct tokens, summed in float32 and in a fixed order on every device.
///
/// Adding row by row in place would round every sum to the embedding's dtype, and a GPU would add in no fixed order. In bfloat16, a sum of
/// a thousand equal addends would lose more than half of them.
pub struct EmbeddingGrad {
    /// Distinct tokens, `[U]`.
    tokens: Tensor,
    /// For each token its row and its addends, `[U + N]`: indices into U rows followed by N addends.
    order: Tensor,
    /// Number of addends per token, `[U]`.
    counts: Tensor,
}

/// The lists of [`EmbeddingGrad`] in an upload.
pub struct EmbeddingGradSlices {
    tokens: UploadSlice,
    order: UploadSlice,
    counts: UploadSlice,
}

impl EmbeddingGrad {
    /// Adds the index lists for addends of these tokens to an upload.
    pub fn plan(tokens: &[i64], indices: &mut Upload<i64>) -> EmbeddingGradSlices {
        let mut addends: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
        for (addend, &token) in tokens.iter().enumerate() {
            addends.entry(token).or_default().push(addend as i64);
        }
        let rows = addends.len() as i64;
        let order = addends.values().enumerate().flat_map(|(row, addends)| {
            std::iter::once(row as i64).chain(addends.iter().map(move |addend| rows + addend))
        });
        EmbeddingGradSlices {
            order: indices.push(order),
            tokens: indices.push(addends.keys().copied()),
            counts: indices.push(addends.values().map(|addends| addends.len() as i64 + 1)),
        }
    }

    /// Takes the index lists from the upload on the device.
    pub fn new(slices: &EmbeddingGradSlices, there: &Uploaded) -> Self {
        let EmbeddingGradSlices { tokens, order, counts } = slices;
        Self { tokens: there.slice(*tokens), order: there.slice(*order), counts: there.slice(*counts) }
    }

    /// Adds `addends [N, r]` to the rows of `gradient [V, r]`. Each row is rounded to its dtype once. Autograd must be off.
    pub fn add_to(&self, gradient: &Tensor, addends: &Tensor) {
        let before = gradient.index_select(0, &self.tokens);
        let all = Tensor::cat(&[&before, addends], 0).to_kind(Kind::Float).index_select(0, &self.order);
        let none = None::<&Tensor>;
        // The counts are known to be right. A check would make the host wait for the device.
        let sums = Tensor::segment_reduce(&all, "sum", Some(&self.counts), none, none, 0, true, 0.0);
        let _ = gradient.shallow_clone().index_copy_(0, &self.tokens, &sums.to_kind(gradient.kind()));
    }
}

/// Float32 sum of what is added to a parameter's gradient. A narrower dtype would round the sum after every addition.
pub struct GradSum {
    gradient: Tensor,
    /// The gradient itself if it is float32.
    sum: Tensor,
}

impl GradSum {
    /// An empty sum of the parameter's shape; None if the parameter is frozen.
    pub fn new(parameter: &Tensor) -> Option<Self> {
        if !parameter.requires_grad() {
            return None;
        }
        let gradient = grad_or_zeros(parameter);
        let sum = match gradient.kind() {
            Kind::Float => gradient.shallow_clone(),
            _ => gradient.zeros_like().to_kind(Kind::Float),
        };
        Some(Self { gradient, sum })
    }

    /// The sum, to which callers add in place.
    pub fn sum(&self) -> &Tensor {
        &self.sum
    }

    /// Adds the sum to the gradient, rounded once. Autograd must be off.
    pub fn finish(mut self) {
        if self.gradient.kind() != Kind::Float {
            let _ = self.gradient.g_add_(&self.sum.to_kind(self.gradient.kind()));
        }
    }
}

/// The gradient of a parameter, to which callers add in place. Creates zeros if the parameter has no gradient yet.
pub fn grad_or_zeros(parameter: &Tensor) -> Tensor {
    if !parameter.grad().defined() {
        // Only a backward pass can create `grad`. A pass through the first row creates all of it, and its values
        // are then zeroed.
        tch::with_grad(|| parameter.narrow(0, 0, 1).sum(None).backward());
        let _ = parameter.grad().zero_();
    }
    parameter.grad()
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn grad(tokens: &[i64]) -> EmbeddingGrad {
        let mut indices = Upload::default();
        let slices = EmbeddingGrad::plan(tokens, &mut indices);
        EmbeddingGrad::new(&slices, &indices.send(Device::Cpu))
    }

    #[test]
    fn a_thousand_equal_addends_give_their_sum_in_bfloat16() {
        let tokens: Vec<i64> = (0..2000).map(|i| if i % 2 == 0 { 5 } else { i }).collect();
        let gradient = Tensor::zeros([2000, 3], (Kind::BFloat16, Device::Cpu));
        grad(&tokens).add_to(&gradient, &Tensor::full([2000, 3], 0.25, (Kind::BFloat16, Device::Cpu)));
        for (row, expected) in [(5, 250.25), (0, 0.0), (1, 0.25), (4, 0.0), (1999, 0.25)] {
            let found = gradient.double_value(&[row, 2]);
            // 8 bits of 250.
            assert!((found - expected).abs() <= 0.5, "row {row} is {found}, expected {expected}");
        }
    }

    /// The old value comes first, then the addends in their order.
    #[test]
    fn float32_sums_have_the_bits_of_one_addition_after_the_other() {
        let tokens: Vec<i64> = (0..600).map(|i| (i * i + 3 * i) % 37).collect();
        let noise = |seed, rows: i64| {
            Tensor::from_slice(&deepspec_testkit::noise(seed, rows as usize * 8)).view([rows, 8])
        };
        let (gradient, addends) = (noise(1, 64), noise(2, 600));
        let expected = gradient.index_add(0, &Tensor::from_slice(&tokens), &addends);
        grad(&tokens).add_to(&gradient, &addends);
        assert!(gradient.equal(&expected));
    }
}
