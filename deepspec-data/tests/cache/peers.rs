//! Python tools read the built cache.

use std::process::Command;

use deepspec_testkit::skip;

use crate::bench::Bench;

const PEERS: &str = r#"
import json, pathlib, sys, zlib
import duckdb, pyarrow.parquet, torch
from safetensors import safe_open

cache = pathlib.Path(sys.argv[1])
manifest = json.loads((cache / "manifest.json").read_text())
table = pyarrow.parquet.read_table(cache / "samples.parquet").to_pylist()
[(tokens,)] = duckdb.sql(f"select sum(len(input_ids)) from '{cache}/samples.parquet'").fetchall()
assert len(table) == manifest["counts"]["samples"] and tokens == manifest["counts"]["tokens"]
shards = []
for entry in manifest["shards"]:
    with safe_open(cache / entry["file"], framework="pt") as file:
        shards.append((file.get_tensor("taps"), file.get_tensor("last")))
d = manifest["identity"]["hidden_size"]
raw = lambda tensor: tensor.contiguous().view(torch.uint8).numpy().tobytes()
for row in table:
    taps, last = shards[row["shard"]]
    mask = [any(s["start"] <= p < s["end"] for s in row["loss_spans"]) for p in range(-1, row["length"] + 1)]
    kept = sum(mask[p] or mask[p + 2] for p in range(row["length"]))
    taps, last = taps[row["first_row"]:][:row["length"]], last[row["first_last_row"]:][:kept]
    assert taps.dtype == last.dtype == torch.bfloat16 and taps.shape == (row["length"], 3 * d) and last.shape == (kept, d)
    assert taps.isfinite().all() and last.isfinite().all() and len(row["input_ids"]) == row["length"]
    assert zlib.crc32(raw(last), zlib.crc32(raw(taps))) == row["checksum"], row["id"]
print(json.dumps([row["id"] for row in table]))
"#;

#[test]
fn python_tools_read_a_built_cache() {
    let Some(python) = skip::python("pyarrow, duckdb, torch and safetensors") else { return };
    let bench = Bench::new(30);
    bench.build("cache", &[]).succeeds_with(&[]);
    let output = Command::new(python).args(["-c", PEERS]).arg(bench.path("cache")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let ids: Vec<String> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(ids, (0..30).map(|i| format!("row-{i}")).collect::<Vec<_>>());
}
