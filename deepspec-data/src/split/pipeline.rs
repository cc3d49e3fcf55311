//! A parallel, ordered pipeline with bounded memory.

use rayon::iter::{IntoParallelIterator, ParallelIterator};

/// Maximum number of pieces in a group. One thread reads and one thread delivers, so more pieces
/// would only use more memory.
const MAX_GROUP_PIECES: usize = 32;

/// Reads pieces, works on them in parallel and delivers the results in order.
///
/// Group n + 1 is read while group n is processed and group n − 1 is delivered.
///
/// # Errors
/// With the first error of any stage; later pieces are not delivered.
pub fn run<P: Send, R: Send>(
    mut read: impl FnMut() -> anyhow::Result<Option<P>> + Send,
    work: impl Fn(P) -> anyhow::Result<R> + Sync,
    mut deliver: impl FnMut(R) -> anyhow::Result<()> + Send,
) -> anyhow::Result<()> {
    let size = (2 * rayon::current_num_threads()).min(MAX_GROUP_PIECES);
    let mut read_group = || -> anyhow::Result<Vec<P>> {
        let mut group = Vec::with_capacity(size);
        while group.len() < size {
            let Some(piece) = read()? else { break };
            group.push(piece);
        }
        Ok(group)
    };
    let (mut pieces, mut results) = (read_group()?, vec![]);
    while !pieces.is_empty() || !results.is_empty() {
        let ((delivered, next), worked) = rayon::join(
            || rayon::join(|| results.into_iter().try_for_each(&mut deliver), &mut read_group),
            || pieces.into_par_iter().map(&work).collect::<anyhow::Result<Vec<R>>>(),
        );
        delivered?;
        results = worked?;
        pieces = next?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_and_errors_end_it() {
        let read = |from: u32, to: u32| {
            let mut numbers = from..to;
            move || Ok(numbers.next())
        };
        let mut found = vec![];
        let push = |n| {
            found.push(n);
            Ok(())
        };
        run(read(0, 1000), |n| Ok(n * 2), push).unwrap();
        assert!(found.into_iter().eq((0..1000).map(|n| n * 2)));

        let mut delivered = 0;
        let work = |n| if n == 700 { anyhow::bail!("no {n}") } else { Ok(n) };
        let deliver = |n| {
            delivered = n;
            Ok(())
        };
        let error = run(read(0, 1000), work, deliver).unwrap_err();
        assert_eq!(error.to_string(), "no 700");
        assert!(delivered < 700);
        assert!(run(read(0, 0), |_: u32| Ok(()), |()| anyhow::bail!("nothing to deliver")).is_ok());
    }
}
