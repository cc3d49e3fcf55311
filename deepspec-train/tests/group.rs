//! Ranks as threads of one process: results of the collectives, and errors when a rank fails.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use deepspec_core::recipe::DistBackend;
use deepspec_train::dist::{GroupError, ProcessGroup, RendezvousServer};
use tch::{Device, Kind, Tensor};

/// Long enough for any machine; only tests of a timeout wait that long.
const PATIENCE: Duration = Duration::from_secs(120);
const GLOO: DistBackend = DistBackend::Gloo;

/// The device of the tensors: DEEPSPEC_TEST_DEVICE, else the CPU.
fn device() -> Device {
    let name = std::env::var("DEEPSPEC_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    deepspec_ops::parse_device(&name).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs `work` as each of `ranks` ranks and returns what they return.
fn ranks<T: Send>(ranks: usize, work: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let host = RendezvousServer::open(ranks, PATIENCE).unwrap();
    let places: Vec<_> = (0..ranks).map(|rank| host.child_env(rank, ranks)).collect();
    // A rank that leaves during another rank's handshake would already cause an error there.
    let met = Barrier::new(ranks);
    thread::scope(|scope| {
        let (work, met) = (&work, &met);
        let threads: Vec<_> = places
            .iter()
            .map(|place| {
                scope.spawn(move || {
                    let group = ProcessGroup::connect(place, device(), GLOO, PATIENCE);
                    met.wait();
                    work(group.unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn sums_copies_and_bytes_go_around() {
    ranks(3, |group| {
        let rank = group.rank() as i64;
        assert_eq!((group.world_size(), group.is_leader()), (3, rank == 0));
        for kind in [Kind::Float, Kind::Double, Kind::Int64] {
            let mut sum = Tensor::full([5], rank + 1, (kind, device()));
            group.all_reduce("a sum", &mut sum).unwrap();
            assert_eq!(sum, Tensor::full([5], 6, (kind, device())));
        }
        for kind in [Kind::Float, Kind::BFloat16] {
            let own = Tensor::full([2, 3], rank as f64 + 0.5, (kind, device()));
            let mut copy = own.set_requires_grad(true);
            group.broadcast("a copy", &mut copy, 2).unwrap();
            assert_eq!(copy.to_kind(Kind::Float), Tensor::full([2, 3], 2.5, (Kind::Float, device())));
        }
        let words = ["", "one", "twenty-two"].map(str::as_bytes);
        assert_eq!(group.all_gather("words", words[rank as usize]).unwrap(), words);
        assert!(group.any("a question", rank == 1).unwrap());
        assert!(!group.any("a question", false).unwrap());
        group.barrier("the end").unwrap();
    });
}

/// libtorch's record of first collectives is shared by all groups of a process.
#[test]
fn groups_begin_beside_each_other() {
    const GROUPS: usize = 4;
    let ready = Barrier::new(2 * GROUPS);
    for _ in 0..5 {
        thread::scope(|scope| {
            for number in 0..GROUPS {
                let ready = &ready;
                scope.spawn(move || {
                    ranks(2, |group| {
                        ready.wait();
                        let mut one = Tensor::from_slice(&[1.0f32]);
                        match number % 3 {
                            0 => group.all_reduce("the first", &mut one).unwrap(),
                            1 => group.broadcast("the first", &mut one, 0).unwrap(),
                            _ => drop(group.all_gather("the first", b"1").unwrap()),
                        }
                    })
                });
            }
        });
    }
}

#[test]
fn a_process_on_its_own_has_nothing_to_do() {
    let group = ProcessGroup::single_process();
    let mut sum = Tensor::from_slice(&[1.0, 2.0]);
    group.all_reduce("a sum", &mut sum).unwrap();
    assert_eq!(sum, Tensor::from_slice(&[1.0, 2.0]));
    assert_eq!(group.all_gather("words", b"me").unwrap(), [b"me"]);
    assert!(group.any("a question", true).unwrap() && !group.any("a question", false).unwrap());
}

#[test]
fn the_error_of_a_rank_reaches_all_others() {
    let errors = ranks(3, |group| {
        if group.rank() == 1 {
            group.fail("the disk is full");
            return None;
        }
        Some(group.barrier("a step").unwrap_err())
    });
    for rank in [0, 2] {
        let expected =
            GroupError::Peer { rank, operation: "a step", peer: 1, cause: "the disk is full".into() };
        assert_eq!(errors[rank], Some(expected));
    }
}

#[test]
fn a_rank_that_goes_without_a_word_is_named() {
    let errors = ranks(3, |group| (group.rank() != 2).then(|| group.barrier("a step").unwrap_err()));
    for rank in [0, 1] {
        let Some(GroupError::Silent { silent, operation, .. }) = &errors[rank] else { panic!("{errors:?}") };
        assert_eq!((silent.as_slice(), *operation), (&[2][..], "a step"));
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let host = RendezvousServer::open(2, PATIENCE).unwrap();
    let alone = ProcessGroup::connect(&host.child_env(1, 2), Device::Cpu, GLOO, Duration::from_secs(1));
    assert!(matches!(alone, Err(GroupError::Missing { rank: 1, missing, .. }) if missing == [0]));
}
