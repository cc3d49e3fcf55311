//! Non-negative least squares.

/// Number of sweeps of coordinate descent, far more than convergence needs.
const MAX_SWEEPS: usize = 20_000;

/// Finds x ≥ 0 that minimises Σ (row · x − 1)² over the rows, by coordinate descent. The first
/// coordinate is optimised first, so that it gets the time that the rows cannot attribute to one
/// coordinate. If each row is divided by its total time, the errors are relative.
pub fn non_negative_least_squares<const N: usize>(rows: &[[f64; N]]) -> [f64; N] {
    let mut x = [0.0; N];
    for round in 0..MAX_SWEEPS * N {
        let at = round % N;
        let square: f64 = rows.iter().map(|row| row[at] * row[at]).sum();
        if square > 0.0 {
            let missing = |row: &[f64; N]| 1.0 - row.iter().zip(&x).map(|(a, b)| a * b).sum::<f64>();
            let slope: f64 = rows.iter().map(|row| row[at] * missing(row)).sum();
            x[at] = (x[at] + slope / square).max(0.0);
        }
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_are_there_are_found_and_others_are_none() {
        let rows = [[0.5, 100.0], [0.25, 150.0], [0.1, 400.0], [0.8, 20.0]];
        let took = rows.map(|[seconds, steps]| 1.2 * seconds + 1e-3 * steps);
        let relative: Vec<[f64; 2]> =
            rows.iter().zip(took).map(|(row, took)| row.map(|part| part / took)).collect();
        let [factor, step] = non_negative_least_squares(&relative);
        assert!((factor - 1.2).abs() < 1e-9 && (step - 1e-3).abs() < 1e-12, "{factor} {step}");
        // A negative time per step is fitted as 0.
        let took = rows.map(|[seconds, steps]| 2.0 * seconds - 1e-5 * steps);
        let relative: Vec<[f64; 2]> =
            rows.iter().zip(took).map(|(row, took)| row.map(|part| part / took)).collect();
        assert_eq!(non_negative_least_squares(&relative)[1], 0.0);
        // One row cannot separate the parts, so the first gets everything.
        assert_eq!(non_negative_least_squares(&[[2.0, 8.0]]), [0.5, 0.0]);
    }
}
