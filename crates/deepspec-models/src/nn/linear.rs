//! Products with weights, whose rows do not depend on each other.

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

/// Outputs below which a product takes a path of its own, whatever its layout.
const FEW_OUTPUTS: i64 = 16;

/// A weight `[output, input]` laid out input by input. On the CPU a product of few rows takes about two thirds of the time so, and
/// agrees with larger ones bit by bit from fewer rows on.
pub fn laid_out_for_few_rows(weight: Tensor) -> Tensor {
    if second_layout_bytes(&weight) == 0 {
        return weight;
    }
    weight.tr().contiguous().tr()
}

/// Bytes that [`laid_out_for_few_rows`] takes beside the weight; 0 where it gives the weight itself.
pub fn second_layout_bytes(weight: &Tensor) -> u64 {
    let is_wanted =
        weight.device() == Device::Cpu && weight.kind() == Kind::Float && weight.size()[0] >= FEW_OUTPUTS;
    if is_wanted && weight.stride()[0] != 1 { weight.numel() as u64 * size_of::<f32>() as u64 } else { 0 }
}

/// `x Wᵀ (+ b)` over the last dimension. On the CPU a row's result does not depend on how many rows it comes with: products of some numbers of
/// rows agree bit by bit, as far as trials say; smaller ones are padded to the least of them, and larger ones are taken in pieces where nothing learns.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let (mut size, width) = (x.size(), weight.size()[1]);
    let rows = x.numel() as i64 / width;
    if x.device() != Device::Cpu || rows == 0 {
        return x.linear(weight, bias);
    }
    let learns = x.requires_grad() || weight.requires_grad();
    if weight.size()[0] == 1 && weight.kind() == Kind::Float && !learns {
        // Products of one output are far slower than sums.
        let y = (x * weight).sum_dim_intlist(-1, true, weight.kind());
        return bias.map_or_else(|| y.shallow_clone(), |bias| &y + bias);
    }
    let by_input = weight.stride()[0] == 1;
    let fewest = if by_input { *FEWEST_BY_INPUT } else { *FEWEST_BY_OUTPUT };
    let in_pieces = rows > PIECE && weight.kind() == Kind::Float && !learns && !many_agree(weight, by_input);
    if rows >= fewest && !in_pieces {
        return x.linear(weight, bias);
    }
    let x = x.reshape([rows, width]);
    if let Some(last) = size.last_mut() {
        *last = weight.size()[0];
    }
    if in_pieces {
        let pieces: Vec<Tensor> = x.split(PIECE, 0).iter().map(|x| linear(x, weight, bias)).collect();
        return Tensor::cat(&pieces, 0).view(size.as_slice());
    }
    let padded = Tensor::cat(&[&x, &x.narrow(0, 0, 1).expand([fewest - rows, width], false)], 0);
    padded.linear(weight, bias).narrow(0, 0, rows).reshape(size)
}

/// Products of fewer rows take another path through this CPU's matrix routines and differ in the last bits. Found by trial: 2 on
/// some CPUs, 4 or 16 on others, where weights lie output by output.
static FEWEST_BY_OUTPUT: LazyLock<i64> = LazyLock::new(|| fewest(|weight| weight));
/// The same for weights that are [`laid_out_for_few_rows`]: 2 and 4 where it was tried.
static FEWEST_BY_INPUT: LazyLock<i64> = LazyLock::new(|| fewest(laid_out_for_few_rows));

/// Rows up to which products agreed with each other in all shapes that were tried.
const PIECE: i64 = 128;
/// More rows that are tried, with and without a rest behind the pieces.
const MANY: [i64; 3] = [193, 300, 512];

/// Whether products of more than [`PIECE`] rows agree with smaller ones as well. MKL's for whole AVX-512 vectors do not where sums are as long as a
/// power of two from 1,024 on: from 192 rows on they are added up otherwise.
fn many_agree(weight: &Tensor, by_input: bool) -> bool {
    /// By length of the sums, how many there are, and the layout of the weight.
    static FOUND: Mutex<BTreeMap<(i64, i64, bool), bool>> = Mutex::new(BTreeMap::new());
    let [outputs, width] = [weight.size()[0].min(512), weight.size()[1]];
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    *found.entry((width, outputs, by_input)).or_insert_with(|| {
        tch::no_grad(|| {
            let mut weight = values(outputs, width);
            if by_input {
                weight = laid_out_for_few_rows(weight);
            }
            MANY.iter().all(|&rows| {
                let x = values(rows, width);
                let pieces: Vec<Tensor> =
                    x.split(PIECE, 0).iter().map(|x| linear(x, &weight, None)).collect();
                x.linear(&weight, None::<&Tensor>).equal(&Tensor::cat(&pieces, 0))
            })
        })
    })
}

/// Numbers to try products with.
fn values(rows: i64, width: i64) -> Tensor {
    Tensor::arange(rows * width, (Kind::Float, Device::Cpu)).sin().view([rows, width])
}

const CANDIDATES: [i64; 4] = [2, 4, 8, 16];
const MOST_ROWS: i64 = 32;
/// Shapes of the weights tried: what a path is good for depends on the length of the sums, and on how many there are.
const SHAPES: [[i64; 2]; 6] = [[96, 192], [192, 320], [96, 1024], [1024, 64], [192, 512], [192, 1024]];

fn fewest(lay_out: fn(Tensor) -> Tensor) -> i64 {
    tch::no_grad(|| *CANDIDATES.iter().find(|&&rows| agrees_from(rows, lay_out)).unwrap_or(&MOST_ROWS))
}

/// Whether products of `rows` rows and more have the bits of larger ones.
fn agrees_from(rows: i64, lay_out: fn(Tensor) -> Tensor) -> bool {
    SHAPES.iter().all(|&[outputs, width]| {
        let (x, weight) = (values(4 * MOST_ROWS, width), lay_out(values(outputs, width)));
        let all = x.linear(&weight, None::<&Tensor>);
        (rows..=MOST_ROWS).all(|rows| {
            let part = x.narrow(0, 0, rows).linear(&weight, None::<&Tensor>);
            part.equal(&all.narrow(0, 0, rows))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_do_not_depend_on_their_number() {
        let layouts: [fn(Tensor) -> Tensor; 2] = [laid_out_for_few_rows, |weight| weight];
        for ((width, outputs, most), lay_out) in
            [(288, 192, 300), (1024, 192, 600)].into_iter().flat_map(|shape| layouts.map(|of| (shape, of)))
        {
            let values = |rows: i64| {
                Tensor::from_slice(&deepspec_testkit::noise(rows as u64, (width * rows) as usize))
                    .view([rows, width])
            };
            let (x, weight) = (values(most), lay_out(values(outputs)));
            let all = linear(&x, &weight, None);
            for rows in (1..96).chain((96..most).step_by(37)) {
                let some = linear(&x.narrow(0, most - rows, rows), &weight, None);
                assert!(some.equal(&all.narrow(0, most - rows, rows)), "{rows} rows of {width}");
            }
            let exact = x.to_kind(Kind::Double).linear(&weight.to_kind(Kind::Double), None::<&Tensor>);
            assert!(all.to_kind(Kind::Double).allclose(&exact, 1e-4, 1e-4, false));
        }
    }
}
