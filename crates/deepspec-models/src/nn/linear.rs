//! Products with weights, whose rows do not depend on each other.

use std::sync::LazyLock;

use tch::{Device, Kind, Tensor};

/// `x Wᵀ (+ b)` over the last dimension. On the CPU a row's result does not depend on how many rows it comes with: from
/// [`FEWEST_ROWS`] on, products agree bit by bit, and smaller ones are padded to that.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let (mut size, width) = (x.size(), weight.size()[1]);
    let rows = x.numel() as i64 / width;
    if x.device() != Device::Cpu || rows >= *FEWEST_ROWS || rows == 0 {
        return x.linear(weight, bias);
    }
    let x = x.reshape([rows, width]);
    let padded = Tensor::cat(&[&x, &x.narrow(0, 0, 1).expand([*FEWEST_ROWS - rows, width], false)], 0);
    if let Some(last) = size.last_mut() {
        *last = weight.size()[0];
    }
    padded.linear(weight, bias).narrow(0, 0, rows).reshape(size)
}

/// Products of fewer rows take another path through this CPU's matrix routines and differ in the last bits. Found by trial: 4 on
/// some CPUs, 16 on others.
static FEWEST_ROWS: LazyLock<i64> = LazyLock::new(|| {
    tch::no_grad(|| *CANDIDATES.iter().find(|&&rows| agrees_from(rows)).unwrap_or(&MOST_ROWS))
});

const CANDIDATES: [i64; 3] = [4, 8, 16];
const MOST_ROWS: i64 = 32;
/// Input widths tried: what a path is good for depends on the length of the sums.
const WIDTHS: [i64; 3] = [192, 320, 1024];

/// Whether products of `rows` rows and more have the bits of larger ones.
fn agrees_from(rows: i64) -> bool {
    WIDTHS.iter().all(|&width| {
        let values =
            |rows: i64| Tensor::arange(rows * width, (Kind::Float, Device::Cpu)).sin().view([rows, width]);
        let (x, weight) = (values(4 * MOST_ROWS), values(96));
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
