//! Reads golden cases: inputs and expected numbers from the reference that an implementation must
//! reproduce.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Folder of a golden case, under `DEEPSPEC_GOLDEN` or the workspace's `tests/golden`.
pub fn dir(case: &str) -> PathBuf {
    let root = std::env::var_os("DEEPSPEC_GOLDEN")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden"), PathBuf::from);
    root.join(case)
}

/// A dense array. Integers and masks are read as `i64`, floats as `f32`, and float64 as `f64`.
#[derive(Debug, Clone)]
pub struct Array {
    /// Sizes of the dimensions, outermost first.
    pub shape: Vec<i64>,
    /// The values, row-major.
    pub values: Values,
}

/// The values of an [`Array`].
#[derive(Debug, Clone)]
pub enum Values {
    /// float32, or bfloat16 widened.
    Float(Vec<f32>),
    /// float64.
    Double(Vec<f64>),
    /// Any integer type.
    Int(Vec<i64>),
}

impl Array {
    /// The values as `f64`, whatever their dtype.
    pub fn f64s(&self) -> Vec<f64> {
        match &self.values {
            Values::Float(values) => values.iter().map(|&v| f64::from(v)).collect(),
            Values::Double(values) => values.clone(),
            Values::Int(values) => values.iter().map(|&v| v as f64).collect(),
        }
    }

    /// The values of an integer array.
    pub fn ints(&self) -> Vec<i64> {
        match &self.values {
            Values::Int(values) => values.clone(),
            other => panic!("expected integers, found {other:?}"),
        }
    }

    /// Row `index` along the first dimension.
    pub fn row(&self, index: usize) -> Self {
        let size: usize = self.shape[1..].iter().product::<i64>() as usize;
        let span = index * size..(index + 1) * size;
        let values = match &self.values {
            Values::Float(v) => Values::Float(v[span].to_vec()),
            Values::Double(v) => Values::Double(v[span].to_vec()),
            Values::Int(v) => Values::Int(v[span].to_vec()),
        };
        Self { shape: self.shape[1..].to_vec(), values }
    }

    /// Integers of one ragged row, without the `-1` padding.
    pub fn ragged_row(&self, index: usize) -> Vec<i64> {
        self.row(index).ints().into_iter().filter(|&v| v != -1).collect()
    }
}

/// One golden case.
pub struct Case {
    /// Folder of the case.
    pub dir: PathBuf,
    /// `case.json`: hyper-parameters, constants and scalar expectations.
    pub json: Value,
    inputs: BTreeMap<String, Array>,
    expected: BTreeMap<String, Array>,
}

impl Case {
    /// Loads the case of this name.
    pub fn load(name: &str) -> Self {
        let dir = dir(name);
        let text =
            fs::read_to_string(dir.join("case.json")).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        Self {
            json: serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", dir.display())),
            inputs: arrays(&dir.join("inputs.safetensors")),
            expected: arrays(&dir.join("expected.safetensors")),
            dir,
        }
    }

    /// An input array.
    pub fn input(&self, name: &str) -> &Array {
        self.inputs.get(name).unwrap_or_else(|| panic!("{}: no input `{name}`", self.dir.display()))
    }

    /// An expected array.
    pub fn expected(&self, name: &str) -> &Array {
        self.expected.get(name).unwrap_or_else(|| panic!("{}: no expected `{name}`", self.dir.display()))
    }

    /// All expected arrays by name.
    pub fn all_expected(&self) -> &BTreeMap<String, Array> {
        &self.expected
    }

    /// The value of an expected scalar of case.json.
    pub fn scalar(&self, name: &str) -> &Value {
        &self.json["expected_scalars"][name]["value"]
    }

    /// A hyper-parameter of case.json.
    pub fn hyper(&self, name: &str) -> &Value {
        &self.json["hyper_parameters"][name]
    }
}

/// Reads all arrays of a safetensors file.
pub fn arrays(path: &Path) -> BTreeMap<String, Array> {
    if !path.exists() {
        return BTreeMap::new();
    }
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    file.iter()
        .map(|(name, view)| {
            let data = view.data();
            let values = match view.dtype() {
                Dtype::F32 => Values::Float(decode_values(data, f32::from_le_bytes)),
                Dtype::F64 => Values::Double(decode_values(data, f64::from_le_bytes)),
                Dtype::BF16 => Values::Float(decode_values(data, |b| half::bf16::from_le_bytes(b).to_f32())),
                Dtype::I64 => Values::Int(decode_values(data, i64::from_le_bytes)),
                Dtype::I32 => Values::Int(decode_values(data, |b| i64::from(i32::from_le_bytes(b)))),
                Dtype::U8 | Dtype::BOOL => Values::Int(data.iter().map(|&b| i64::from(b)).collect()),
                other => panic!("{}: `{name}` is {other:?}", path.display()),
            };
            (name.to_string(), Array { shape: view.shape().iter().map(|&n| n as i64).collect(), values })
        })
        .collect()
}

fn decode_values<const N: usize, T>(data: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    data.as_chunks::<N>().0.iter().map(|&word| read(word)).collect()
}
