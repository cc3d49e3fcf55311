//! The stand-in GPU (`tests/standin`) refuses and counts operations as a real GPU would, so that
//! tests on it are meaningful. Each test runs itself again in a process with the stand-in.

use std::env;
use std::process::Command;

use deepspec_ops::kv_attention::Chunk;
use deepspec_ops::{
    GatedDeltaCache, GatedDeltaInputs, GatedDeltaSpec, GatedDeltaWeights, device_memory, parse_device,
    reset_device_peak,
};
use deepspec_testkit::fake_gpu::{FakeGpu, Report};
use tch::{Device, Kind, TchError, Tensor};

/// Memory of a GPU, if a test names no other.
const MEGABYTE: u64 = 1 << 20;

/// Returns Ok in a process with stand-in GPUs. Otherwise runs the test `name` in a process with two
/// of them, one megabyte each. Then returns that process's report, or None if this build is for
/// real GPUs.
fn lent(name: &str) -> Result<(), Option<Report>> {
    lent_with(name, MEGABYTE)
}

/// As [`lent`], with GPUs of `bytes` bytes.
fn lent_with(name: &str, bytes: u64) -> Result<(), Option<Report>> {
    if env::var_os("DEEPSPEC_STANDIN_DEVICES").is_some() {
        assert_eq!(parse_device("cuda"), Ok(Device::Cuda(0)));
        return Ok(());
    }
    let program = env::current_exe().unwrap();
    let Some(gpu) = FakeGpu::for_program(&program) else { return Err(None) };
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report.json");
    let mut command = Command::new(&program);
    command
        .args(["--exact", name])
        .env("DEEPSPEC_STANDIN_DEVICES", "2")
        .env("DEEPSPEC_STANDIN_MEMORY", bytes.to_string());
    let output = gpu.attach_with_report(&mut command, &report).output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    Err(Some(Report::load(&report)))
}

fn ones(device: Device) -> Tensor {
    Tensor::ones([2, 3], (Kind::Float, device))
}

#[track_caller]
fn refused(outcome: Result<Tensor, TchError>, words: &[&str]) {
    let error = outcome.expect_err("it was not refused").to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{words:?} not in {error}");
}

#[test]
fn operands_on_two_devices_are_refused() {
    if lent("operands_on_two_devices_are_refused").is_err() {
        return;
    }
    let (host, gpu, other) = (ones(Device::Cpu), ones(Device::Cuda(0)), ones(Device::Cuda(1)));
    refused(gpu.f_add(&host), &["on the same device", "cuda:0", "cpu"]);
    refused(gpu.f_add(&other), &["on the same device", "cuda:0", "cuda:1"]);
    refused(gpu.f_matmul(&host.transpose(0, 1)), &["on the same device", "mat2"]);
    refused(gpu.f_masked_select(&host.gt(0.0)), &["on the same device", "mask"]);
    let rows = Tensor::from_slice(&[0i64]);
    refused(gpu.f_index_select(0, &rows), &["on the same device", "index"]);
    refused(host.f_index(&[Some(rows.to_device(Device::Cuda(0)))]), &["indices should be either on cpu"]);
    refused(Tensor::f_ones([1], (Kind::Float, Device::Cuda(2))), &["invalid device ordinal"]);
    // A CPU scalar may be an operand of a GPU operator.
    assert_eq!((gpu + Tensor::from(1.0f32)).device(), Device::Cuda(0));
}

#[test]
fn memory_is_counted_and_ends() {
    if lent("memory_is_counted_and_ends").is_err() {
        return;
    }
    let gpu = Device::Cuda(1);
    let fresh = |bytes: i64| Tensor::f_zeros([bytes], (Kind::Uint8, gpu));
    let block = fresh(600_000).unwrap();
    refused(
        fresh(600_000),
        &["CUDA out of memory. Tried to allocate 586.", "GPU 1 has a total capacity of 1.00 MiB"],
    );
    drop(block);
    drop(fresh(700_000).unwrap());
    let small = fresh(1000).unwrap();
    let found = device_memory(gpu).unwrap();
    assert_eq!(found.in_use, 1024);
    assert!((700_000..701_000).contains(&found.peak), "{found:?}");
    reset_device_peak(gpu);
    assert_eq!(device_memory(gpu).unwrap().peak, 1024);
    assert_eq!((device_memory(Device::Cuda(0)).unwrap().peak, device_memory(Device::Cpu)), (0, None));
    drop(small);
}

#[test]
fn transfers_and_waits_are_counted() {
    let Err(report) = lent("transfers_and_waits_are_counted") else {
        let gpu = ones(Device::Cpu).to_device(Device::Cuda(0)); // an upload
        let mask = gpu.gt(0.0);
        let _ = gpu.index(&[Some(Tensor::from_slice(&[1i64]))]); // a hidden upload
        let _ = gpu.index(&[Some(mask.shallow_clone())]); // a wait
        let _ = gpu.shallow_clone().masked_fill_(&mask, 2.0);
        let _ = mask.nonzero(); // a wait
        let _ = gpu.sum(Kind::Float).double_value(&[]); // a download
        let _ = gpu.to_device(Device::Cpu); // a download
        let _ = gpu.to_device(Device::Cuda(1)); // neither an upload nor a download
        tch::Cuda::synchronize(0); // a wait
        return;
    };
    let Some(found) = report else { return };
    let counts = ["uploads", "downloads", "waits", "peer_copies"].map(|what| found.operation_count(what));
    assert_eq!(counts, [2, 2, 3, 1]);
}

/// Bytes by which the stand-in rounds an allocation up, at most.
const ROUNDING: u64 = 511;
/// Sequences of the test below.
const SLOTS: usize = 3;

/// Plans count [`GatedDeltaSpec::sequence_bytes`] for a sequence in a layer: the states before and behind its
/// last tokens, and the tokens' inputs and gates. Sequences take that much after 63 tokens, and no more after
/// other ones.
#[test]
fn states_of_linear_attention_take_the_planned_memory() {
    if lent_with("states_of_linear_attention_take_the_planned_memory", 64 * MEGABYTE).is_err() {
        return;
    }
    let _no_grad = tch::no_grad_guard();
    let (gpu, layers) = (Device::Cuda(1), 2);
    let spec = GatedDeltaSpec { key_heads: 1, value_heads: 2, key_dim: 32, value_dim: 16, kernel: 4 };
    let tensor = |shape: &[i64], kind| Tensor::ones(shape, (kind, gpu));
    let weights = GatedDeltaWeights {
        conv: tensor(&[spec.channels(), spec.kernel], Kind::Float),
        decay_rate: tensor(&[spec.value_heads], Kind::Float),
        dt_bias: tensor(&[spec.value_heads], Kind::Float),
    };
    let mut cache = GatedDeltaCache::new(vec![spec; layers], SLOTS, Kind::BFloat16, gpu);
    let used = || device_memory(gpu).unwrap().in_use;
    let before = used();
    // Appends tokens to the sequences behind `past` ones, and returns the bytes that the sequences take.
    let append = |cache: &mut GatedDeltaCache, past: [usize; SLOTS], lens: [usize; SLOTS]| {
        let chunk = |slot| Chunk { slot, past_len: past[slot], len: lens[slot] };
        let chunks: Vec<Chunk> = (0..SLOTS).map(chunk).collect();
        let rows = lens.iter().sum::<usize>() as i64;
        for layer in 0..layers {
            let rows = |width| tensor(&[rows, width], Kind::BFloat16);
            let heads = spec.value_heads;
            let inputs = GatedDeltaInputs { qkv: rows(spec.channels()), a: rows(heads), b: rows(heads) };
            drop(cache.forward(layer, &chunks, &inputs, &weights));
        }
        cache.commit_chunks(&chunks);
        used() - before
    };
    let cut = |cache: &mut GatedDeltaCache, lens: [usize; SLOTS]| {
        lens.into_iter().enumerate().for_each(|(slot, len)| cache.truncate(slot, len));
    };

    let planned = (SLOTS * cache.sequence_bytes()) as u64;
    assert_eq!(cache.sequence_bytes(), layers * spec.sequence_bytes(Kind::BFloat16));
    // Two states, inputs and two gates of each sequence and layer.
    let most = planned + (SLOTS * layers * 5) as u64 * ROUNDING;
    let full = append(&mut cache, [0; SLOTS], [63; SLOTS]);
    assert!((planned..=most).contains(&full), "{full} bytes, {planned} were planned");
    // Blocks of eight, of which some tokens are rejected, and the states that are rebuilt then.
    let mut past = [63; SLOTS];
    for kept in [[1, 4, 8], [8, 8, 2], [3, 1, 5]] {
        let found = append(&mut cache, past, [8; SLOTS]);
        assert!(found < planned, "{found} bytes after a block, {planned} were planned");
        past = std::array::from_fn(|slot| past[slot] + kept[slot]);
        cut(&mut cache, past);
    }
    cut(&mut cache, [0; SLOTS]);
    assert_eq!(used(), before);
    // Prompts of several chunks keep no more than their last tokens.
    let found = append(&mut cache, [0; SLOTS], [150, 127, 64]);
    assert!(found < planned, "{found} bytes after prompts, {planned} were planned");
}
