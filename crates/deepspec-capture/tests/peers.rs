//! pyarrow, DuckDB and Python's safetensors read a cache and see the written values.
//!
//! Runs only if `DEEPSPEC_TEST_PYTHON` names a Python with these packages.

#[path = "common_cache/mod.rs"]
mod common;

use std::process::Command;

use common::*;
use deepspec_capture::cache::{Encoding, FinalStates, Layout, Plan, PlannedSample};
use deepspec_testkit::skip;
use serde_json::{Value, json};

const SCRIPT: &str = r#"
import json, pathlib, sys, zlib
import duckdb, pyarrow.parquet, torch
from safetensors import safe_open

cache = pathlib.Path(sys.argv[1])
manifest = json.loads((cache / "manifest.json").read_text())
table = pyarrow.parquet.read_table(cache / "samples.parquet").to_pylist()
with_duckdb = duckdb.sql(f"select id, len(input_ids), list_sum(input_ids), loss_spans[1]['start'], loss_spans[-1]['end'] from '{cache}/samples.parquet'").fetchall()
shards = []
for entry in manifest["shards"]:
    with safe_open(cache / entry["file"], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, file.metadata()
        shards.append((file.get_tensor("taps"), file.get_tensor("last")))
        assert [tensor.dtype for tensor in shards[-1]] == [torch.bfloat16] * 2

def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()

seen = []
for index, row in enumerate(table):
    taps, last = shards[row["shard"]]
    mask = [any(span["start"] <= p < span["end"] for span in row["loss_spans"]) for p in range(-1, row["length"] + 1)]
    kept = [p for p in range(row["length"]) if mask[p] or mask[p + 2]]
    taps = taps[row["first_row"]:][:row["length"]]
    last = last[row["first_last_row"]:][:len(kept)]
    assert zlib.crc32(raw(last), zlib.crc32(raw(taps))) == row["checksum"], row["id"]
    spans = [[span["start"], span["end"]] for span in row["loss_spans"]]
    first = (row["id"], row["length"], sum(row["input_ids"]), spans[0][0] if spans else None, spans[-1][1] if spans else None)
    assert first == with_duckdb[index], (first, with_duckdb[index])
    seen.append([row["id"], row["input_ids"], spans, row["supervised"], taps.double().sum().item(), last.double().sum().item()])
print(json.dumps(seen))
"#;

#[test]
fn python_tools_read_what_we_wrote() {
    let Some(python) = skip::python("pyarrow, duckdb, torch and safetensors") else { return };
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(50, FinalStates::Supervised, 2000);
    build(dir.path(), &plan, &identity()).unwrap();
    let output = Command::new(python).args(["-c", SCRIPT]).arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    let sum = |bytes: Vec<u8>| -> f64 {
        let values =
            bytes.chunks_exact(2).map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
        values.map(|bits| f64::from(f32::from_bits(bits))).sum()
    };
    let expected: Vec<Value> = plan
        .samples()
        .iter()
        .map(|s| {
            json!([
                s.id,
                s.input_ids,
                s.spans,
                s.supervised_count(),
                sum(taps_of(s)),
                sum(last_of(s, FinalStates::Supervised))
            ])
        })
        .collect();
    assert_eq!(seen, Value::from(expected));
}

const COMPRESSED: &str = r#"
import json, pathlib, sys
import numpy, pyarrow, pyarrow.parquet
from safetensors import safe_open

cache = pathlib.Path(sys.argv[1])
shards = []
for entry in json.loads((cache / "manifest.json").read_text())["shards"]:
    with safe_open(cache / entry["file"], framework="numpy") as file:
        shards.append([file.get_tensor(name) for name in ("taps", "last", "exponents")])
seen = []
for row in pyarrow.parquet.read_table(cache / "samples.parquet").to_pylist():
    taps, last, exponents = shards[row["shard"]]
    mask = [any(span["start"] <= p < span["end"] for span in row["loss_spans"]) for p in range(-1, row["length"] + 1)]
    kept = sum(mask[p] or mask[p + 2] for p in range(row["length"]))
    low = numpy.concatenate([taps[row["first_row"]:][:row["length"]].ravel(), last[row["first_last_row"]:][:kept].ravel()])
    frames = exponents[row["first_exponent"]:][:row["exponent_bytes"]].tobytes()
    high = numpy.frombuffer(pyarrow.decompress(frames, decompressed_size=len(low), codec="zstd", asbytes=True), dtype=numpy.uint8)
    turned = low.astype(numpy.uint16) | high.astype(numpy.uint16) << 8
    seen.append((turned >> 1 | turned << 15).tolist())
print(json.dumps(seen))
"#;

#[test]
fn python_joins_what_we_compressed() {
    let Some(python) = skip::python("numpy, pyarrow and safetensors") else { return };
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout { encoding: Encoding::Bf16z, ..layout(FinalStates::Supervised) };
    let plan = Plan::new(samples(50), layout, 2000).unwrap();
    build(dir.path(), &plan, &identity()).unwrap();
    let output = Command::new(python).args(["-c", COMPRESSED]).arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seen: Vec<Vec<u16>> = serde_json::from_slice(&output.stdout).unwrap();
    let given = |sample: &PlannedSample| -> Vec<u16> {
        let bytes = [taps_of(sample), last_of(sample, FinalStates::Supervised)].concat();
        bytes.as_chunks::<2>().0.iter().map(|&pair| u16::from_le_bytes(pair)).collect()
    };
    assert_eq!(seen, plan.samples().iter().map(given).collect::<Vec<_>>());
}
