//! Tests of GPU connections without NCCL: which rank is named if a connection hangs or fails.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, mpsc};
use std::thread;

use super::*;
use crate::dist::RendezvousServer;

/// Timeout of the tests. Only tests that wait for a timeout use a shorter one.
const PATIENCE: Duration = Duration::from_secs(120);

/// Connects two ranks, where `open` on rank 0 never returns, as NCCL does while a rank is missing.
/// Rank 0 connects with `timeout`. Rank 1 runs `other` and keeps the group that it returns until
/// rank 0 is done. Returns rank 0's error and the number of abandoned threads.
fn stuck(
    timeout: Duration,
    other: impl Fn(ProcessGroup) -> Option<ProcessGroup> + Sync,
) -> (GroupError, usize) {
    let host = RendezvousServer::open(2, PATIENCE).unwrap();
    let places = [0, 1].map(|rank| host.child_env(rank, 2));
    let abandoned = AtomicUsize::new(0);
    // Wait for both ranks: one that left during the handshake would be reported missing there.
    let met = Barrier::new(2);
    let (done, rank_0_is_done) = mpsc::channel::<()>();
    let connect = |place| {
        let group = ProcessGroup::connect(place, Device::Cpu, DistBackend::Auto, PATIENCE);
        met.wait();
        group.unwrap()
    };
    let error = thread::scope(|scope| {
        let (connect, other) = (&connect, &other);
        let second = &places[1];
        scope.spawn(move || {
            let _stays = other(connect(second));
            assert!(rank_0_is_done.recv().is_err());
        });
        let group = connect(&places[0]);
        let (hold, held) = mpsc::channel::<()>();
        let open = move |_| held.recv().map_err(|_| "released".to_string());
        let count = || {
            abandoned.fetch_add(1, Ordering::Relaxed);
        };
        let error = group.connect_gpus(timeout, open, count).map(drop).unwrap_err();
        drop((hold, done));
        error
    });
    (error, abandoned.into_inner())
}

#[test]
fn a_rank_that_fails_while_gpus_are_connected_is_named_at_once() {
    let (error, abandoned) = stuck(PATIENCE, |group| {
        group.barrier("meeting").unwrap();
        group.fail("no room on the GPU");
        Some(group)
    });
    let operation = "connecting the GPUs";
    let cause = "no room on the GPU".into();
    assert_eq!(error, GroupError::Peer { rank: 0, operation, peer: 1, cause });
    assert_eq!(abandoned, 1);
}

#[test]
fn a_rank_whose_own_gpu_cannot_be_connected_tells_the_others_why() {
    let (error, abandoned) = stuck(PATIENCE, |group| {
        let failing = |_| Err::<(), _>("no room\non the GPU".to_string());
        let own = group.connect_gpus(PATIENCE, failing, || panic!("it was left behind")).unwrap_err();
        assert!(own.to_string().contains("no room"), "{own}");
        Some(group)
    });
    let GroupError::Peer { rank: 0, peer: 1, operation: "connecting the GPUs", cause } = error else {
        panic!("{error}")
    };
    assert!(cause.contains("no room") && !cause.contains('\n'), "{cause}");
    assert_eq!(abandoned, 1);
}

#[test]
fn a_rank_that_hangs_while_gpus_are_connected_is_given_up_and_named() {
    let (error, abandoned) = stuck(Duration::from_secs(1), |group| {
        group.barrier("meeting").unwrap();
        Some(group)
    });
    let GroupError::Silent { silent, operation: "connecting the GPUs", problem, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((silent, abandoned), (vec![1], 1));
    assert!(problem.contains("not connected within 1 s"), "{problem}");
}

#[test]
fn a_rank_that_ends_before_gpus_are_connected_is_named_and_none_is_waited_for() {
    let (error, abandoned) = stuck(PATIENCE, |group| {
        group.fail("no GPU");
        None
    });
    let operation = "meeting before the GPUs are connected";
    assert_eq!(error, GroupError::Peer { rank: 0, operation, peer: 1, cause: "no GPU".into() });
    assert_eq!(abandoned, 0);
}

#[test]
fn what_is_connected_is_handed_on_with_keys_of_its_own() {
    let host = RendezvousServer::open(2, PATIENCE).unwrap();
    let places = [0, 1].map(|rank| host.child_env(rank, 2));
    thread::scope(|scope| {
        for place in &places {
            scope.spawn(|| {
                let group = ProcessGroup::connect(place, Device::Cpu, DistBackend::Auto, PATIENCE).unwrap();
                let rank = group.rank();
                let open = move |store: c10d::Store| {
                    store.set(&format!("met/{rank}"), &[7])?;
                    store.get(&format!("met/{}", 1 - rank), PATIENCE)
                };
                let got = group.connect_gpus(PATIENCE, open, || panic!("it was left behind"));
                assert_eq!(got, Ok(Some(vec![7])));
                // The CPU connection still works.
                group.barrier("afterwards").unwrap();
            });
        }
    });
}
