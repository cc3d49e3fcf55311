//! The pool of large CPU tensors: written values stay, from any thread, and freed memory is reused.

#![cfg(target_os = "linux")]

use std::fs;
use std::thread;

use tch::{Device, Kind, Tensor};

const MEGABYTE: usize = 1 << 20;
/// Maximum bytes of live tensors per thread.
const LIVE: usize = 48 * MEGABYTE;
const THREADS: usize = 2;
const TENSORS: usize = 400;

/// Bytes of anonymous memory that are resident now.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<usize>().unwrap() << 10
}

/// Creates and frees tensors of many sizes around the pool's threshold of 128 KB, oldest first.
/// Checks each tensor before freeing it.
fn churn(thread: usize) {
    let mut live = vec![];
    let mut state = thread as u64 + 1;
    for number in 0..TENSORS {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let bytes = 100_000 + (state >> 33) as usize % (6 * MEGABYTE);
        let value = (number % 251) as i64;
        live.push((Tensor::full([bytes as i64], value, (Kind::Uint8, Device::Cpu)), value));
        while live.iter().map(|(tensor, _)| tensor.numel()).sum::<usize>() > LIVE {
            let (tensor, value) = live.remove(0);
            assert_eq!([tensor.min(), tensor.max()].map(|end| end.int64_value(&[])), [value; 2]);
        }
    }
}

#[test]
fn holds_no_more_than_was_needed_at_once() {
    deepspec_ops::init_runtime();
    tch::set_num_threads(1);
    churn(0);
    let before = resident();
    for round in 0..3 {
        thread::scope(|scope| {
            (0..THREADS).for_each(|thread| drop(scope.spawn(move || churn(round * THREADS + thread))))
        });
    }
    let grown = resident().saturating_sub(before);
    // One thread's share was held already; small tensors, stacks and the last tensor above the
    // limit are added.
    let most = (THREADS - 1) * LIVE + THREADS * 12 * MEGABYTE;
    assert!(grown <= most, "{grown} bytes more are held, {most} at most were needed");
}
