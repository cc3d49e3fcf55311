//! Blocks of every type match llama.cpp's own package bit by bit.

use std::fs;
use std::path::Path;
use std::process::Command;

use deepspec_checkpoint::gguf::{BlockType, GgufFile, TensorType};
use deepspec_testkit::skip;
use half::{bf16, f16};

/// Dequantised values, as float32.
fn widened(values: Vec<u8>, kind: TensorType) -> Vec<u8> {
    let halves = values.as_chunks::<2>().0.iter();
    match kind {
        TensorType::F32 => values,
        TensorType::I64 => panic!("no type of blocks"),
        TensorType::F16 => halves.flat_map(|&half| f16::from_le_bytes(half).to_f32().to_le_bytes()).collect(),
        TensorType::Bf16 => {
            halves.flat_map(|&half| bf16::from_le_bytes(half).to_f32().to_le_bytes()).collect()
        }
    }
}

#[test]
fn blocks_are_expanded_as_the_gguf_package_does() {
    let Some(python) = skip::python("gguf") else { return };
    let dir = tempfile::tempdir().unwrap();
    let [file, values] = ["blocks.gguf", "values.bin"].map(|name| dir.path().join(name));
    let names: Vec<&str> = BlockType::all().map(|kind| kind.name).collect();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/blocks.py");
    let run = Command::new(python).arg(script).args([&file, &values]).args(&names).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));

    let (gguf, expected) = (GgufFile::open(&file).unwrap(), fs::read(&values).unwrap());
    let mut rest = expected.as_slice();
    for name in names {
        let stored = &gguf.tensors()[name];
        assert_eq!(stored.shape, [4, 16 * 256], "{name}");
        let (expected, others) = rest.split_at(stored.values() * size_of::<f32>());
        let found = widened(gguf.values(name).unwrap(), stored.kind.decoded_type());
        let differing = found.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!((found.len(), differing), (expected.len(), None), "{name}");
        rest = others;
    }
    assert!(rest.is_empty());
}
