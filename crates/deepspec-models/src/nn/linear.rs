//! Products with weights, whose rows do not depend on each other.

use std::sync::LazyLock;

use tch::{Device, Kind, Tensor};

/// Outputs below which a product takes a path of its own, whatever its layout.
const FEW_OUTPUTS: i64 = 16;

/// A weight `[output, input]` laid out input by input. On the CPU a product of few rows takes about two thirds of the time so, and
/// agrees with larger ones bit by bit from fewer rows on.
pub fn laid_out_for_few_rows(weight: Tensor) -> Tensor {
    if weight.device() != Device::Cpu || weight.kind() != Kind::Float || weight.size()[0] < FEW_OUTPUTS {
        return weight;
    }
    weight.tr().contiguous().tr()
}

/// `x Wᵀ (+ b)` over the last dimension. On the CPU a row's result does not depend on how many rows it comes with: from
/// some number on, products agree bit by bit, and smaller ones are padded to that.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let (mut size, width) = (x.size(), weight.size()[1]);
    let rows = x.numel() as i64 / width;
    if x.device() != Device::Cpu || rows == 0 {
        return x.linear(weight, bias);
    }
    let fewest = if weight.stride()[0] == 1 { *FEWEST_BY_INPUT } else { *FEWEST_BY_OUTPUT };
    if rows >= fewest {
        return x.linear(weight, bias);
    }
    let x = x.reshape([rows, width]);
    let padded = Tensor::cat(&[&x, &x.narrow(0, 0, 1).expand([fewest - rows, width], false)], 0);
    if let Some(last) = size.last_mut() {
        *last = weight.size()[0];
    }
    padded.linear(weight, bias).narrow(0, 0, rows).reshape(size)
}

/// Products of fewer rows take another path through this CPU's matrix routines and differ in the last bits. Found by trial: 4 on
/// some CPUs, 16 on others, where weights lie output by output.
static FEWEST_BY_OUTPUT: LazyLock<i64> = LazyLock::new(|| fewest(|weight| weight));
/// The same for weights that are [`laid_out_for_few_rows`]: 4 where it was tried.
static FEWEST_BY_INPUT: LazyLock<i64> = LazyLock::new(|| fewest(laid_out_for_few_rows));

const CANDIDATES: [i64; 3] = [4, 8, 16];
const MOST_ROWS: i64 = 32;
/// Shapes of the weights tried: what a path is good for depends on the length of the sums, and on how many there are.
const SHAPES: [[i64; 2]; 5] = [[96, 192], [192, 320], [96, 1024], [1024, 64], [192, 512]];

fn fewest(lay_out: fn(Tensor) -> Tensor) -> i64 {
    tch::no_grad(|| *CANDIDATES.iter().find(|&&rows| agrees_from(rows, lay_out)).unwrap_or(&MOST_ROWS))
}

/// Whether products of `rows` rows and more have the bits of larger ones.
fn agrees_from(rows: i64, lay_out: fn(Tensor) -> Tensor) -> bool {
    SHAPES.iter().all(|&[outputs, width]| {
        let values =
            |rows: i64| Tensor::arange(rows * width, (Kind::Float, Device::Cpu)).sin().view([rows, width]);
        let (x, weight) = (values(4 * MOST_ROWS), lay_out(values(outputs)));
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
        let values =
            |rows: i64| Tensor::from_slice(&deepspec_testkit::noise(rows as u64, 288 * rows as usize));
        let [x, weight] = [96, 192].map(|rows| values(rows).view([rows, 288]));
        let all = linear(&x, &weight, None);
        for rows in 1..96 {
            assert!(
                linear(&x.narrow(0, 0, rows), &weight, None).equal(&all.narrow(0, 0, rows)),
                "{rows} rows"
            );
        }
    }
}
