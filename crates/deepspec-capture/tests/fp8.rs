//! Eight-bit states: half the bytes, bounded errors, and codes that torch can read.

#[path = "common_cache/mod.rs"]
mod common;

use std::fs;
use std::process::Command;

use common::*;
use deepspec_capture::cache::{Builder, Encoding, FinalStates, Identity, Layout, Plan, Reader, verify};
use deepspec_core::Tap;
use deepspec_testkit::skip;
use serde_json::Value;

const D: usize = 128;

fn wide() -> (Layout, Identity) {
    let layout = Layout { hidden_size: D, encoding: Encoding::Fp8, ..layout(FinalStates::Supervised) };
    (layout, Identity { hidden_size: D, ..identity() })
}

/// bf16 bytes that cover many magnitudes.
fn values(count: usize, seed: usize) -> Vec<u8> {
    let value = |index: usize| {
        let mixed = (index * 7919 + seed * 104_729) % 10_007;
        (mixed as f32 / 5_000.0 - 1.0) * 2.0_f32.powi((mixed % 23) as i32 - 11)
    };
    (0..count).flat_map(|index| ((value(index).to_bits() >> 16) as u16).to_le_bytes()).collect()
}

/// The states that are written for sample `index`.
fn given(plan: &Plan, index: usize) -> [Vec<u8>; 2] {
    let sample = &plan.samples()[index];
    let (layout, rows) = (plan.layout(), sample.input_ids.len());
    let kept = sample.last_positions(layout.last).len();
    [values(rows * layout.taps.len() * D, index), values(kept * D, index + 1000)]
}

fn fill(builder: &mut Builder, plan: &Plan) {
    let mut index = 0;
    while let Some(mut writer) = builder.next_shard().unwrap() {
        for _ in writer.samples() {
            let [taps, last] = given(plan, index);
            writer.push(&taps, &last).unwrap();
            index += 1;
        }
        writer.finish().unwrap();
    }
}

fn numbers(bytes: &[u8]) -> Vec<f64> {
    let value = |pair: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
    bytes.chunks_exact(2).map(|pair| f64::from(value(pair))).collect()
}

#[test]
fn eight_bits_halve_the_shards_and_keep_the_values() {
    let (layout, identity) = wide();
    let dir = tempfile::tempdir().unwrap();
    let plan = Plan::new(samples(40), layout.clone(), 60_000).unwrap();
    let plain = Plan::new(samples(40), Layout { encoding: Encoding::Bf16, ..layout }, 60_000).unwrap();
    assert!(plan.shards().len() > 1);
    assert!(plan.bytes() as f64 <= 0.52 * plain.bytes() as f64, "{} of {}", plan.bytes(), plain.bytes());
    let mut builder = Builder::open(dir.path(), &plan, &identity).unwrap();
    fill(&mut builder, &plan);
    let manifest = builder.publish().unwrap();
    let on_disk: u64 =
        manifest.shards.iter().map(|shard| fs::metadata(dir.path().join(&shard.file)).unwrap().len()).sum();
    assert_eq!(on_disk, plan.bytes());
    assert!(verify(dir.path(), |_| ()).unwrap().is_empty());

    let reader = Reader::open(dir.path()).unwrap();
    for index in 0..reader.len() {
        let sample = reader.sample(index).unwrap();
        let [mut taps, mut last] = reader.state_bytes(index).unwrap().map(|bytes| vec![0; bytes]);
        reader.read_into(index, &mut taps, &mut last).unwrap();
        assert_eq!(sample.states().unwrap().map(|states| states.into_owned()), [taps.clone(), last.clone()]);
        for (given, read) in given(&plan, index).iter().zip([&taps, &last]) {
            let (given, read) = (numbers(given), numbers(read));
            for (given, read) in given.chunks(D).zip(read.chunks(D)) {
                let largest = given.iter().fold(0.0_f64, |most, value| most.max(value.abs()));
                for (given, read) in given.iter().zip(read) {
                    // From 448 · 2 · 1024 steps below the largest value on, a code has no more
                    // mantissa bits to lose.
                    let bound = (given.abs() / 16.0).max(largest / 224.0 / 1024.0);
                    assert!((given - read).abs() <= bound, "{given} became {read}");
                }
            }
        }
        assert!(message(reader.read_into(index, &mut taps[1..], &mut last)).contains("taps has "));
    }
}

#[test]
fn what_is_no_number_is_refused_in_eight_bits_too() {
    let (layout, identity) = wide();
    let dir = tempfile::tempdir().unwrap();
    let plan = Plan::new(samples(1), layout, 1 << 20).unwrap();
    let mut builder = Builder::open(dir.path(), &plan, &identity).unwrap();
    let mut writer = builder.next_shard().unwrap().unwrap();
    let [mut taps, last] = given(&plan, 0);
    let at = (2 * TAPS.len() + 1) * D * 2;
    taps[at..at + 2].copy_from_slice(&0x7F80_u16.to_le_bytes());
    let text = message(writer.push(&taps, &last));
    assert!(text.contains(&format!("row 2 of tap {} has the value inf", TAPS[1])), "{text}");
    assert!(matches!(TAPS[1], Tap::Layer(3)));
}

const SCRIPT: &str = r#"
import json, pathlib, sys
import pyarrow.parquet, torch
from safetensors import safe_open

cache = pathlib.Path(sys.argv[1])
shards = []
for entry in json.loads((cache / "manifest.json").read_text())["shards"]:
    with safe_open(cache / entry["file"], framework="pt") as file:
        shards.append({name: file.get_tensor(name) for name in file.keys()})
        assert shards[-1]["taps"].dtype == torch.float8_e4m3fn
given = [bytes.fromhex(line) for line in sys.stdin.read().split()]
sums = []
for index, row in enumerate(pyarrow.parquet.read_table(cache / "samples.parquet").to_pylist()):
    shard, rows = shards[row["shard"]], slice(row["first_row"], row["first_row"] + row["length"])
    codes = shard["taps"][rows].view(row["length"], -1, 128)
    scale = shard["taps_scale"][rows].float().unsqueeze(-1)
    bf16 = torch.frombuffer(bytearray(given[index]), dtype=torch.bfloat16).view_as(codes)
    own = (bf16.float() / scale).to(torch.float8_e4m3fn)
    assert torch.equal(own.view(torch.uint8), codes.view(torch.uint8)), row["id"]
    decoded = (codes.float() * scale).to(torch.bfloat16)
    sums.append(decoded.double().sum().item())
every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
print(json.dumps([sums, [value if value == value else None for value in every]]))
"#;

#[test]
fn torch_makes_and_reads_the_same_codes() {
    let Some(python) = skip::python("pyarrow, torch and safetensors") else { return };
    let (layout, identity) = wide();
    let dir = tempfile::tempdir().unwrap();
    let plan = Plan::new(samples(30), layout, 60_000).unwrap();
    let mut builder = Builder::open(dir.path(), &plan, &identity).unwrap();
    fill(&mut builder, &plan);
    builder.publish().unwrap();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let lines: Vec<String> = (0..30).map(|index| hex(&given(&plan, index)[0])).collect();
    let input = dir.path().join("given.txt");
    fs::write(&input, lines.join("\n")).unwrap();
    let output = Command::new(python)
        .args(["-c", SCRIPT])
        .arg(dir.path())
        .stdin(fs::File::open(input).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    let sums: Vec<f64> = (0..30)
        .map(|index| numbers(&reader.sample(index).unwrap().states().unwrap()[0]).iter().sum())
        .collect();
    assert_eq!(seen[0], Value::from(sums));
    for code in 0..=u8::MAX {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
        let magnitude = match exponent {
            0 => mantissa * 2.0_f64.powi(-6),
            _ => (1.0 + mantissa) * 2.0_f64.powi(exponent - 7),
        };
        let signed = if code & 0x80 == 0 { magnitude } else { -magnitude };
        let expected = if code & 0x7F == 0x7F { Value::Null } else { Value::from(signed) };
        assert_eq!(seen[1][usize::from(code)], expected, "{code:02x}");
    }
}
