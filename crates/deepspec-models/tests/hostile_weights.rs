//! Weight files with false headers are all refused by name, even if their numbers would overflow.

use std::fs;
use std::path::Path;

use deepspec_models::Weights;
use deepspec_testkit::mutate::Fuzzer;
use serde_json::{Value, json};
use tch::{Device, Kind};

const VALUES: usize = 64;

fn file(length: u64, header: &[u8], values: usize) -> Vec<u8> {
    [&length.to_le_bytes()[..], header, &vec![0; values]].concat()
}

fn of(header: &Value) -> Vec<u8> {
    let header = header.to_string().into_bytes();
    file(header.len() as u64, &header, VALUES)
}

fn header(dtype: &str, shape: Value, offsets: Value) -> Value {
    json!({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})
}

/// The error of opening the file, or of reading all tensors that it claims to contain.
fn refusal(dir: &Path, bytes: &[u8]) -> Option<String> {
    let path = dir.join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    let found = Weights::open(dir, "hostile", Device::Cpu, Kind::Float).and_then(|weights| {
        weights.value_count();
        weights.get("w", &[4, 4]).map(drop)
    });
    let told = found.err()?.to_string();
    assert!(told.contains(dir.to_str().unwrap()), "no file is named: {told}");
    Some(told)
}

#[test]
fn sizes_that_overflow_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let good = header("F32", json!([4, 4]), json!([0, 64]));
    assert_eq!(refusal(dir.path(), &of(&good)), None);
    let text = good.to_string().into_bytes();
    for length in [u64::MAX, u64::MAX - 7, u64::MAX / 2, 1 << 40, 100_000_001, text.len() as u64 + 65] {
        let told = refusal(dir.path(), &file(length, &text, VALUES)).unwrap();
        assert!(told.contains(&format!("claims {length} bytes")), "{told}");
    }
    let most = u64::MAX;
    for (dtype, shape, offsets) in [
        ("F32", json!([4, 4]), json!([0, most])),
        ("F32", json!([4, 4]), json!([most, most])),
        ("F32", json!([4, 4]), json!([most - 63, 0])),
        ("F32", json!([4, 4]), json!([64, 0])),
        ("F32", json!([4, 4]), json!([0, 65])),
        ("F32", json!([4, 4]), json!([64, 128])),
        ("F32", json!([most, most]), json!([0, 64])),
        ("F32", json!([1_u64 << 32, 1_u64 << 32]), json!([0, 0])),
        ("F64", json!([1_u64 << 61]), json!([0, 0])),
        ("U8", json!([most]), json!([0, most])),
        ("U8", json!([1_u64 << 60]), json!([0, 1_u64 << 60])),
        ("F4", json!([most]), json!([0, 64])),
        ("F32", json!([0, most, most]), json!([0, 0])),
        ("BOOL", json!([64]), json!([0, 64])),
        ("F99", json!([4, 4]), json!([0, 64])),
    ] {
        let said = format!("{dtype} {shape} {offsets}");
        assert!(refusal(dir.path(), &of(&header(dtype, shape, offsets))).is_some(), "{said} passed");
    }
    // Two overlapping tensors, and a gap between two tensors.
    for second in [[32, 64], [80, 96]] {
        let mut two = header("F32", json!([4, 4]), json!([0, 64]));
        two["v"] = json!({"dtype": "F32", "shape": [(second[1] - second[0]) / 4], "data_offsets": second});
        assert!(refusal(dir.path(), &of(&two)).is_some(), "{second:?} passed");
    }
}

#[test]
fn damaged_headers_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let good = header("F32", json!([4, 4]), json!([0, 64]));
    let mut dice =
        Fuzzer::new(5, &["F32", "BF16", "w", "data_offsets", "shape", "dtype", "18446744073709551615"]);
    let mut refused = 0;
    for run in 0..300 {
        let mut bytes = of(&good);
        match run % 3 {
            0 => {
                let at = dice.roll(bytes.len() - VALUES);
                bytes[at] = dice.roll(256) as u8;
            }
            1 => bytes.truncate(dice.roll(bytes.len())),
            _ => {
                let line = dice.line(good.clone());
                bytes = file(line.len() as u64, line.as_ref(), VALUES);
            }
        }
        refused += usize::from(refusal(dir.path(), &bytes).is_some());
    }
    assert!(refused > 200, "only {refused} of 300 were refused");
}

#[test]
fn indexes_that_lead_nowhere_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    for map in [
        json!({}),
        json!(7),
        json!({"w": "../model.safetensors"}),
        json!({"w": "/etc/passwd"}),
        json!({"w": ".."}),
        json!({"w": 3}),
        json!({"w": "missing.safetensors"}),
    ] {
        fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();
        let told = refusal(dir.path(), &of(&header("F32", json!([4, 4]), json!([0, 64]))));
        assert!(told.is_some(), "{map} passed");
    }
}
